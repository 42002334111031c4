"""The contract that every backend keeps: its methods, and the types they take. `Reference` (kernels/reference.py)
computes all of it in plain PyTorch and is the judge in tests; the other backends override what they compute faster.
kernels/backend_selection.py chooses one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from quire.kernels.attention_params import AttentionParams
from quire.kernels.collective import Collective
from quire.kernels.kv_quantization import UNIT_KV_SCALES, KVScales
from quire.kernels.latent_params import LatentNormRopeParams
from quire.kernels.parameters.activation import Activation, ClampedSwiGLU
from quire.kernels.qk_norm_rope import QKNormRopeParams
from quire.kernels.quantized_tensors import Activations, QuantizedWeight
from quire.kernels.recurrent.recurrence import Recurrence, RecurrenceMetadata, RecurrentStates, StateAndVerifiedCounts
from quire.kernels.recurrent.short_conv import ConvStates, ShortConv
from quire.kernels.routing import MoE, MoEComponents

CachePair = tuple[Tensor, Tensor]
CudaGraphSupport = Literal["steps", "decodes", "nothing"]  # what a CUDA graph can hold: what does not look at the host
LayerCache = tuple[Tensor, ...]
"""What a layer keeps of sequences, as its part asked for it: by page, then by the sequence's slot (the first axis)."""


@dataclass(frozen=True, slots=True)
class LinearContext:
    """What a linear must know of the rows that it multiplies."""

    adapter_slots: Tensor | None = None  # [rows] int64: the slot of each row's adapter; None: no row has one
    row_order: Tensor | None = None  # [rows] int64, on a GPU: the rows' numbers, those of an adapter side by side

    @classmethod
    def from_adapter_slots(cls, adapter_slots: Tensor) -> LinearContext:
        """Of the rows that have these adapters. It makes no host wait, and a CUDA graph can hold it."""
        return cls(adapter_slots, torch.argsort(adapter_slots, stable=True) if adapter_slots.is_cuda else None)

    def select_rows(self, rows: Tensor) -> LinearContext:
        """The context of these rows alone."""
        return self if self.adapter_slots is None else self.from_adapter_slots(self.adapter_slots[rows])


NO_ADAPTERS = LinearContext()
Linear = Callable[[Tensor, LinearContext], Tensor]
"""[rows, in_features] to [rows, out_features]."""


@dataclass(frozen=True, slots=True)
class LoraDelta:
    """What an adapter (LoRA: Hu et al., 2021) adds to some outputs of a linear: x @ down.T @ up.T."""

    first_output: int
    """The first of these outputs, which are those of one of the joined linears; no two deltas are of the same."""
    down: Tensor
    """[rank, in_features] of the model's dtype."""
    up: Tensor
    """[outs, rank] of the same, times the adapter's scale."""


@dataclass(frozen=True, slots=True)
class AdapterSlotSpec:
    """How many adapters a linear has room for at once, the linear's shape, and a Delta's largest rank."""

    num_slots: int
    """Slots 1 to this; slot 0 is no adapter."""
    in_features: int
    output_sizes: tuple[int, ...]
    """Outputs of the linears that are joined in it, in their order; a Delta is of one of them."""
    max_rank: int
    dtype: torch.dtype
    """Of its inputs."""
    has_float32_output: bool
    """Whether its outputs are float32, whatever the dtype."""
    device: torch.device


class LinearWithLora(ABC):
    """A linear, and what adapters add to rows: those without have the linear's own bits, and none depends on others."""

    @abstractmethod
    def __call__(self, x: Tensor, context: LinearContext) -> Tensor:
        """As every Linear."""

    @abstractmethod
    def pack_one_adapter(self, deltas: Sequence[LoraDelta]) -> Any:
        """One adapter's deltas in the form that `put_adapter` takes. May be called by any thread, at any time."""

    @abstractmethod
    def put_adapter(self, slot: int, packed: Any) -> None:
        """Let the rows of this slot have these deltas from the next call on; None: none."""


@dataclass(frozen=True, slots=True)
class QuantizedEmbedding:
    """A quantized embedding."""

    embed_tokens: Callable[[Tensor], Tensor]
    """Token ids [T] to its rows, [T, hidden] in the model's dtype."""
    lm_head: Linear | None
    """[R, hidden] to [R, vocab] float32, by the same weight; None: it is not the head as well."""


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """Where the tokens of one step lie: T tokens, ragged over S sequences. All tensors are on the model's device.

    Sequence s owns tokens query_start[s] to query_start[s + 1] of the step; they are the last ones of its
    context_lens[s] tokens, and the KV of all of these is in the pages that block_table[s] names, in order."""

    query_start: Tensor  # [S + 1] int32, cumulative token counts
    context_lens: Tensor  # [S] int32, keys per sequence, this step's tokens included
    key_start: Tensor  # [S + 1] int32, cumulative context_lens
    block_table: Tensor  # [S, most pages of a row] int32, padded with any valid page id
    positions: Tensor  # [T] int64, absolute position of each token
    slot_mapping: Tensor  # [T] int64, page id * block size + offset: where each token's KV is stored
    max_query_len: int
    max_context_len: int
    linear_context: LinearContext = NO_ADAPTERS  # of the T tokens
    is_full_prefill: bool = False  # whether all keys are this step's own: whole prompts of which nothing was cached
    other_groups: tuple[AttentionMetadata, ...] = ()
    """The same with the block tables and slots of the other groups of layers, from the second on, where layers of
    different windows have pages of their own. What a table names before a window's tokens is of no sequence."""
    state_slots: Tensor | None = None  # [S] int64: where each sequence keeps what is not in pages; None: no layer does
    state_and_verified_counts: StateAndVerifiedCounts | None = (
        None  # None: no token is one, or was one in the step before
    )
    rope_position_override: Tensor | None = (
        None  # [T] int64, the position that each token is rotated by; None: its position
    )
    mrope_positions: Tensor | None = (
        None  # [T, 3] int64, the same by time, row and column of an image; None: all are alike
    )
    bidirectional_spans: BidirectionalSpans | None = None  # None: every token sees what is before it, and no more
    per_layer_inputs: Tensor | None = None  # [T, W], what layers read of tokens beside the stream; None: no layer does
    recurrence_metadata: RecurrenceMetadata | None = None  # None: of matrices too a sequence is what it is of attention
    decode_prefill_parts: tuple[
        AttentionMetadata, ...
    ] = ()  # of decodes and prompts, these two for attention: kernels/gpu/prefill_decode_split.py
    query_key_lens: tuple[tuple[int, int], ...] = ()  # (queries, keys) of each sequence; (): the host was not told

    def with_block_tables(self, tables: Sequence[Tensor], slot_mappings: Sequence[Tensor]) -> AttentionMetadata:
        """With these block tables and slots, by group, of which the first are its own."""
        if len(tables) == 1:
            return self
        pairs = list(zip(tables, slot_mappings, strict=True))
        return replace(
            self,
            other_groups=tuple(
                replace(self, block_table=table, slot_mapping=slot_mapping) for table, slot_mapping in pairs[1:]
            ),
        )

    @property
    def rope_positions(self) -> Tensor:
        """[T] int64: the position that each token is rotated by."""
        return self.positions if self.rope_position_override is None else self.rope_position_override

    @property
    def is_text_only(self) -> bool:
        """Whether all tokens are computed as those of text are."""
        return self.mrope_positions is None and self.bidirectional_spans is None

    def group_metadata(self, group: int) -> AttentionMetadata:
        return self.other_groups[group - 1] if group else self


@dataclass(frozen=True, slots=True)
class BidirectionalSpans:
    """Tokens that see each other, those behind them too: parts of prompts, each of which ends in this step."""

    token_indices: Tensor  # [P] int64, their places among the step's tokens
    metadata: AttentionMetadata  # of these P alone, a sequence for each part, which ends where the part does


class Operations(ABC):
    """What the parts of a decoder's layers are made of, for T tokens, H query heads, K key-value heads, D head_dim: a
    backend computes each at once, or notes it, to compute a whole list of them at once later
    (`Backend.record_layers`)."""

    @abstractmethod
    def apply_linear(self, linear: Linear, x: Activations, context: LinearContext) -> Tensor:
        """What a linear gives. x stays."""

    @abstractmethod
    def run_moe(self, moe: MoE, x: Tensor, router_input: Tensor) -> Tensor:
        """What a mixture of experts gives. x and routed, which may be the same, stay."""

    @abstractmethod
    def all_reduce(self, x: Tensor, group: Collective | None) -> Tensor:
        """The sum of the ranks' x, where the model has some (None: x). May overwrite x."""

    @abstractmethod
    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x / sqrt(mean(x^2) + eps) * weight over the last axis (Zhang and Sennrich, 2019), in float32, as weights."""

    @abstractmethod
    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """(rms_norm(x + residual), x + residual), all [T, hidden]. May overwrite x and residual."""

    @abstractmethod
    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        """The same with (x - mean) / sqrt(variance + eps) * weight + bias (Ba et al., 2016)."""

    @abstractmethod
    def add_layer_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """The same with layer_norm."""

    @abstractmethod
    def add_residual(self, x: Tensor, residual: Tensor) -> Tensor:
        """x + residual. May overwrite residual."""

    @abstractmethod
    def add_gated(self, x: Tensor, gate: Tensor, residual: Tensor) -> Tensor:
        """x * sigmoid(gate) + residual for x [T, F] and a gate of each token [T, 1]. May overwrite residual."""

    @abstractmethod
    def apply_activation(self, x: Tensor, activation: Activation) -> Tensor:
        """The activation of each number. May overwrite x."""

    @abstractmethod
    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """silu(gate) * up for gate_up [T, 2 * F], gate in the first half: [T, F]."""

    @abstractmethod
    def gelu_mul(self, gate_up: Tensor) -> Tensor:
        """The same with GELU in the tanh approximation (Hendrycks and Gimpel, 2016)."""

    @abstractmethod
    def mul_by_column_slice(self, x: Tensor, per_layer_inputs: Tensor, first: int) -> Tensor:
        """x [T, F] times the columns of `per_layer_inputs` [T, W] from `first` on. May overwrite x."""

    @abstractmethod
    def rope_and_store_kv(
        self, qkv: Tensor, rope: QKNormRopeParams, k_cache: Tensor, v_cache: Tensor, metadata: AttentionMetadata
    ) -> Tensor:
        """Split qkv [T, (H + 2K) * D], norm and rotate q and k, store k and v. Returns q [T, H, D]. K follows from the
        caches' shape. With `QKNormRopeParams.projections` K or 2K heads are not there. May overwrite qkv."""

    @abstractmethod
    def paged_attention(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, metadata: AttentionMetadata, softmax: AttentionParams
    ) -> Tensor:
        """Causal attention of q [T, H, D] over its sequences' pages, [T, H, D], or [T, H, AttentionParams.value_dim].
        The query at position p sees keys from AttentionParams.first_visible_key(p), or 0, to p. What is read is what
        the pages hold: of codes the rounded numbers, of the step's own tokens too. H is a multiple of K; query head h
        reads key-value head h // (H / K). Scores and sums are float32. A row's result depends on its own query and keys
        alone: batch, chunks and page ids change no bit of it (but on a GPU, where the backend was not made
        deterministic)."""

    def context_parallel_attention(
        self, q: Tensor, caches: CachePair, metadata: AttentionMetadata, softmax: AttentionParams, group: Collective
    ) -> Tensor:
        """The same of ranks that divide every sequence's tokens (`Backend.make_context_parallel_backend`): q [T, H /
        ranks, D] of this rank's heads, caches of all K heads for its tokens. `softmax.bias` is of all heads,
        `softmax.sinks` of this rank's. A row's bits follow from the number of ranks; the CPU's kernels give those of
        one process. Raises RankEnded."""
        raise NotImplementedError

    @abstractmethod
    def rope_and_store_latent_kv(
        self, q: Tensor, kv: Tensor, latent: LatentNormRopeParams, cache: Tensor, metadata: AttentionMetadata
    ) -> Tensor:
        """Norm, rotate, store kv [T, L + R]: kernels/latent_params.py. Returns q [T, H, any + R], turned in
        place."""

    @abstractmethod
    def short_conv(self, bcx: Tensor, conv: ShortConv, columns: ConvStates, metadata: AttentionMetadata) -> Tensor:
        """What kernels/recurrent/short_conv.py says of bcx [T, 3 * channels], b, c and x side by side, or of x alone:
        [T, channels]. Keeps the columns of all T tokens. A row may begin with what an earlier one stores in a page."""

    @abstractmethod
    def run_recurrence(
        self,
        inputs: Tensor,
        z: Tensor,
        head_inputs: Tensor,
        rule: Recurrence,
        states: RecurrentStates,
        metadata: AttentionMetadata,
    ) -> Tensor:
        """What kernels/recurrent/recurrence.py says of what tokens give [T, rule.inputs], their gates z [T, heads *
        value], and numbers of each head [T, rule.beside]: [T, heads * value]. Keeps the states of all sequences."""

    @abstractmethod
    def concat_columns(self, x: Tensor, y: Tensor) -> Tensor:
        """[T, A] and [T, B] side by side: [T, A + B]."""

    @abstractmethod
    def cast(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """x in this type."""

    @abstractmethod
    def sigmoid_mul(self, x: Tensor, gate: Tensor) -> Tensor:
        """x [T, F] * sigmoid(gate), gate [T, G]: each of F / G numbers side by side. May overwrite x."""


LayerFunction = Callable[[Operations, Tensor, Tensor | None, AttentionMetadata], tuple[Tensor, Tensor]]
RecordedLayers = Callable[[Tensor, Tensor | None, AttentionMetadata, range], tuple[Tensor, Tensor]]
"""The operations of a layer, and of some consecutive ones. x [T, hidden] is what the layer before gives, not yet added
to the stream `residual` (None: x is the embeddings); so is what it returns. It may overwrite both."""


class Backend(Operations):
    name: str
    block_size: int
    """Tokens in a page."""
    skips_negative_slots = False
    """Whether slots below 0, of tokens that other ranks keep, store nothing; else these have a page of nobody's."""
    keeps_weights_quantized: bool
    """Whether quantized weights stay as small as they are; else they are dequantized while they are loaded."""
    cuda_graph_support: (
        CudaGraphSupport  # "decodes": of one token each, without mixtures of experts and states of whole sequences
    )

    def make_context_parallel_backend(self, ranks: int) -> Backend | None:
        """The same for ranks that divide every sequence's tokens, as many of each page for each; None: it cannot."""
        return None

    @abstractmethod
    def description(self) -> str:
        """What computes, for the log: the library and its version, the instruction set."""

    @abstractmethod
    def unsupported_reason(
        self, device: torch.device, dtype: torch.dtype, head_dim: int, softcap: bool = False
    ) -> str | None:
        """Why it cannot serve such a model there, in one line that says what would help; None where it can, and only
        then other methods may be called. softcap: the model caps its attention scores."""

    def unsupported_kv_dtype_reason(self, kv_dtype: torch.dtype) -> str | None:
        """Why its pages cannot hold one of QUANTIZED_KV_DTYPES, in one line that says what would help; None where they
        can."""
        return None

    def unsupported_attention_reason(self, *, sinks: bool, latents: bool, chunks: bool) -> str | None:
        """Why its attention takes no AttentionParams.sinks, .values or .chunked, if these are asked for, likewise."""
        return None

    @abstractmethod
    def is_batch_invariant(self, device: torch.device, dtype: torch.dtype) -> bool:
        """Whether a row has the same bits in every batch, as far as tests show it."""

    @abstractmethod
    def kv_cache_shape(self, num_blocks: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> tuple[int, ...]:
        """Shape of one layer's key cache and of its value cache; the first axis is the page. dtype: what pages hold:
        that of q, k and v, or one of QUANTIZED_KV_DTYPES. The layout inside a page is the backend's own, of block_size
        * K * D elements, or for codes block_size * K * (D + num_scale_elements). Pages of more than 16 tokens are
        [tokens, ...], so that a page's beginning can be copied. All methods tell by the dtype of the caches what these
        hold."""

    @abstractmethod
    def store_kv(
        self, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor, scales: KVScales = UNIT_KV_SCALES
    ) -> None:
        """Write k, v [T, K, D] to the pages at slots [T], rounded where the pages hold codes."""

    @abstractmethod
    def clamp_silu_mul(self, gate_up: Tensor, clamp: ClampedSwiGLU) -> Tensor:
        """silu_mul as Clamp says it."""

    @abstractmethod
    def pack_linear(self, weight: Tensor, bias: Tensor | None, *, wide: bool = False) -> Linear:
        """x @ weight.T + bias, weight [out, in]; `weight` may be dropped afterwards. wide: the result is float32."""

    @abstractmethod
    def pack_per_head_linear(self, weights: Sequence[Tensor], passthrough_dim: int) -> Linear:
        """[T, B * (in + passed)] to [T, B * (out + passed)] by B weights [out, in]:
        kernels/mla/per_head_linear.py."""

    @abstractmethod
    def pack_quantized(
        self, weights: Sequence[QuantizedWeight], bias: Tensor | None, *, dtype: torch.dtype, wide: bool = False
    ) -> Linear:
        """Weights of one input as one linear, their outputs side by side, for x of this dtype; what is given may be
        dropped afterwards. How x is rounded to integers, if it is, depends on its row alone. wide: as above."""

    @abstractmethod
    def pack_quantized_embedding(
        self, weight: QuantizedWeight, *, dtype: torch.dtype, tied: bool
    ) -> QuantizedEmbedding:
        """An embedding [vocab, hidden], which may be dropped afterwards; tied: it is the head as well."""

    @abstractmethod
    def make_moe(self, experts: MoEComponents) -> MoE:
        """The experts as one call: the weighed sum of what each token's experts give."""

    @abstractmethod
    def make_linear_with_lora(self, linear: Linear, slots: AdapterSlotSpec) -> LinearWithLora:
        """The linear with room for adapters. Raises ValueError where this backend cannot serve any; it says why."""

    @abstractmethod
    def fit_int4(self, groups: Tensor, *, zero_points: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Floating-point weights [n, 32] in 4 bits, each group with a scale and an offset, as kernels/int4_fit.py finds
        them: codes [n, 16] uint8 as in GroupedWeight, scales [n] and offsets [n] float32; a weight is
        scale * (code - 8) + offset. With zero points, whole ones from 0 to 15 in the offsets' place, it is
        scale * (code - zero), and scales have the 8 bits of bfloat16."""

    def record_layers(
        self, layers: Sequence[LayerFunction], hidden: int, dtype: torch.dtype, *, starts: bool, groups: int
    ) -> RecordedLayers | None:
        """Consecutive layers as one call, with the bits of their operations one by one; None where there is no such.
        hidden, dtype: of the stream. starts: it begins in the first of them. groups: their metadata's block tables."""
        return None

    def create_rank_memory(self, count: int, row_bytes: int) -> int | None:
        """What so many processes on one machine need to compute together: a descriptor that each must get. row_bytes:
        of the longest row that they will put side by side. None where the backend has no such way."""
        return None

    @abstractmethod
    def make_collective(self, descriptor: int, rank: int, count: int, parent: int = 0) -> Collective:
        """One such process' view of all; `descriptor` may then be closed. parent: what it ends with; 0: nothing."""

    @abstractmethod
    def argmax(self, logits: Tensor) -> Tensor:
        """The first of the largest values of each row, [R, vocab] to [R] int64."""

    @abstractmethod
    def sample_tokens(self, logits: Tensor, filters: Tensor, u: Tensor) -> Tensor:
        """A token for each row of logits [R, vocab] float32: [R] int64. filters [R, 4] float64: temperature (above 0),
        top_k (from 1 to vocab), top_p, min_p. Top-k, then top-p of what it left (Holtzman et al., 2020), and min-p keep
        what is at or above a threshold value, so equal logits are kept or dropped together. The result is the first
        kept token, in the vocabulary's order, at which the cumulative probability exceeds u times that of all kept
        tokens. u [R] float64 is from 0 to below 1."""
