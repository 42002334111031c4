"""Interfaces of the kernel backends. Tests compare each backend with `ReferenceBackend`."""

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
from quire.kernels.latent_params import KeySelectionParams, LatentNormRopeParams
from quire.kernels.parameters.activation import Activation, ClampedSwiGLU
from quire.kernels.qk_norm_rope import QKNormRopeParams
from quire.kernels.quantized_tensors import Activations, QuantizedWeight
from quire.kernels.recurrent.recurrence import Recurrence, RecurrenceMetadata, RecurrentStates, StateAndVerifiedCounts
from quire.kernels.recurrent.short_conv import ConvStates, ShortConv
from quire.kernels.routing import MoE, MoEComponents

CachePair = tuple[Tensor, Tensor]
CudaGraphSupport = Literal["steps", "decodes", "nothing"]  # what CUDA graphs can record
LayerCache = tuple[Tensor, ...]


@dataclass(frozen=True, slots=True)
class LinearContext:
    adapter_slots: Tensor | None = None  # [rows] int64; None: no row has an adapter
    row_order: Tensor | None = None  # [rows] int64, GPU only: row indices sorted by adapter

    @classmethod
    def from_adapter_slots(cls, adapter_slots: Tensor) -> LinearContext:
        """CUDA graphs can record this call."""
        return cls(adapter_slots, torch.argsort(adapter_slots, stable=True) if adapter_slots.is_cuda else None)

    def select_rows(self, rows: Tensor) -> LinearContext:
        return self if self.adapter_slots is None else self.from_adapter_slots(self.adapter_slots[rows])


NO_ADAPTERS = LinearContext()
Linear = Callable[[Tensor, LinearContext], Tensor]
"""Maps [rows, in_features] to [rows, out_features]."""


@dataclass(frozen=True, slots=True)
class LoraDelta:
    """The term x @ down.T @ up.T (LoRA, Hu et al., 2021), which is added to some outputs of a linear."""

    first_output: int
    """A delta stays within one of the fused linears. Deltas do not overlap."""
    down: Tensor
    """[rank, in_features] in the model's dtype."""
    up: Tensor
    """[outs, rank] in the model's dtype, already multiplied by the adapter's scale."""


@dataclass(frozen=True, slots=True)
class AdapterSlotSpec:
    num_slots: int
    """Slots are numbered from 1. Slot 0 means no adapter."""
    in_features: int
    output_sizes: tuple[int, ...]
    """One size per fused linear."""
    max_rank: int
    dtype: torch.dtype
    has_float32_output: bool
    device: torch.device


class LinearWithLora(ABC):
    """Rows without an adapter get exactly the linear's bits. The delta that a row gets from its adapter does not depend
    on other rows.
    """

    @abstractmethod
    def __call__(self, x: Tensor, context: LinearContext) -> Tensor: ...

    @abstractmethod
    def pack_one_adapter(self, deltas: Sequence[LoraDelta]) -> Any:
        """Pack an adapter's deltas for `put_adapter`. Thread-safe."""

    @abstractmethod
    def put_adapter(self, slot: int, packed: Any) -> None:
        """Fill the slot from the next call on, or clear it if `packed` is None."""


@dataclass(frozen=True, slots=True)
class QuantizedEmbedding:
    embed_tokens: Callable[[Tensor], Tensor]
    """Maps token ids [T] to [T, hidden] in the model's dtype."""
    lm_head: Linear | None
    """Maps [R, hidden] to [R, vocab] float32. None: the LM head is not tied."""


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """T tokens of S sequences in a step, on the model's device.

    Tokens query_start[s] to query_start[s + 1] are the last ones of sequence s, whose KV is in the blocks of
    block_table[s].
    """

    query_start: Tensor  # [S + 1] int32, cumulative
    context_lens: Tensor  # [S] int32, number of keys, including this step's
    key_start: Tensor  # [S + 1] int32, cumulative context_lens
    block_table: Tensor  # [S, max blocks] int32, padded with any valid block id
    positions: Tensor  # [T] int64, absolute
    slot_mapping: Tensor  # [T] int64, block id * block size + offset
    max_query_len: int
    max_context_len: int
    linear_context: LinearContext = NO_ADAPTERS
    is_full_prefill: bool = False  # all keys are from this step
    other_groups: tuple[AttentionMetadata, ...] = ()
    """Metadata of KV cache groups 1 and up. Block table entries before a sliding window do not name this sequence's
    blocks.
    """
    state_slots: Tensor | None = None  # [S] int64; None if the model has no recurrent state
    # None if neither this step nor the last one has draft tokens
    state_and_verified_counts: StateAndVerifiedCounts | None = None
    rope_position_override: Tensor | None = None  # [T] int64; None: rope_positions are `positions`
    mrope_positions: Tensor | None = None  # [T, 3] int64: time, row and column in an image; None if all three are equal
    bidirectional_spans: BidirectionalSpans | None = None  # None: attention is causal
    per_layer_inputs: Tensor | None = None  # [T, W], additional input of layers
    recurrence_metadata: RecurrenceMetadata | None = None  # None: recurrent layers have attention's sequences
    # The two parts of a mixed batch.
    decode_prefill_parts: tuple[AttentionMetadata, ...] = ()
    query_key_lens: tuple[tuple[int, int], ...] = ()  # (queries, keys) of each sequence; () if unknown on the host

    def with_block_tables(self, tables: Sequence[Tensor], slot_mappings: Sequence[Tensor]) -> AttentionMetadata:
        """The arguments have one item per KV cache group. Item 0 must be this object's."""
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
        """[T] int64."""
        return self.positions if self.rope_position_override is None else self.rope_position_override

    @property
    def is_text_only(self) -> bool:
        return self.mrope_positions is None and self.bidirectional_spans is None

    def group_metadata(self, group: int) -> AttentionMetadata:
        return self.other_groups[group - 1] if group else self


@dataclass(frozen=True, slots=True)
class BidirectionalSpans:
    """Spans of prompts, such as images, whose tokens also see the later tokens of their span. Each span ends in this
    step.
    """

    token_indices: Tensor  # [P] int64, indices among the step's tokens
    metadata: AttentionMetadata  # of the P tokens; each span is one sequence that ends with the span


class Operations(ABC):
    """Operations that run at once, or are recorded by `Backend.record_layers`. T is tokens, H query heads, K KV heads,
    D head_dim.
    """

    @abstractmethod
    def apply_linear(self, linear: Linear, x: Activations, context: LinearContext) -> Tensor:
        """Must not change x."""

    @abstractmethod
    def run_moe(self, moe: MoE, x: Tensor, router_input: Tensor) -> Tensor:
        """Must not change x and router_input, which may be the same tensor."""

    @abstractmethod
    def all_reduce(self, x: Tensor, group: Collective | None) -> Tensor:
        """Return x itself if `group` is None. May overwrite x."""

    @abstractmethod
    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """RMSNorm (Zhang and Sennrich, 2019). Weights and arithmetic are float32."""

    @abstractmethod
    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """Return (rms_norm(x + residual), x + residual), all [T, hidden]. May overwrite x and residual."""

    @abstractmethod
    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        """LayerNorm (Ba et al., 2016), with the dtypes of rms_norm."""

    @abstractmethod
    def add_layer_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """Like add_rms_norm, but with layer_norm."""

    @abstractmethod
    def add_residual(self, x: Tensor, residual: Tensor) -> Tensor:
        """May overwrite residual."""

    @abstractmethod
    def add_gated(self, x: Tensor, gate: Tensor, residual: Tensor) -> Tensor:
        """Return x * sigmoid(gate) + residual for x [T, F] and gate [T, 1]. May overwrite residual."""

    @abstractmethod
    def apply_activation(self, x: Tensor, activation: Activation) -> Tensor:
        """May overwrite x."""

    @abstractmethod
    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """Return silu(gate) * up [T, F] for gate_up [T, 2 * F], which has the gate first."""

    @abstractmethod
    def gelu_mul(self, gate_up: Tensor) -> Tensor:
        """Like silu_mul, but with tanh-approximated GELU (Hendrycks and Gimpel, 2016)."""

    @abstractmethod
    def mul_by_column_slice(self, x: Tensor, per_layer_inputs: Tensor, first: int) -> Tensor:
        """Return x [T, F] times columns `first` to `first` + F of `per_layer_inputs` [T, W]. May overwrite x."""

    @abstractmethod
    def rope_and_store_kv(
        self, qkv: Tensor, rope: QKNormRopeParams, k_cache: Tensor, v_cache: Tensor, metadata: AttentionMetadata
    ) -> Tensor:
        """qkv is [T, (H + 2K) * D], the returned q [T, H, D]. May overwrite qkv. With other
        `QKNormRopeParams.projections` than "all", qkv has K or 2K heads fewer.
        """

    @abstractmethod
    def paged_attention(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, metadata: AttentionMetadata, softmax: AttentionParams
    ) -> Tensor:
        """Return causal attention of q [T, H, D] over paged KV: [T, H, D], or [T, H, AttentionParams.value_dim].

        Query head h reads KV head h // (H / K). Scores and sums are float32. A row's bits do not depend on batch,
        chunks or block ids, except on GPU backends that are not deterministic.
        """

    def context_parallel_attention(
        self, q: Tensor, caches: CachePair, metadata: AttentionMetadata, softmax: AttentionParams, group: Collective
    ) -> Tensor:
        """Compute paged_attention on ranks that divide each sequence's tokens. Raises RankEnded.

        q [T, H / ranks, D] and `softmax.sinks` have this rank's heads, `softmax.relative_bias` has all heads. The
        caches hold this rank's tokens for all K heads. Bits depend on the number of ranks, except with the CPU kernels.
        """
        raise NotImplementedError

    @abstractmethod
    def rope_and_store_latent_kv(
        self, q: Tensor, kv: Tensor, latent: LatentNormRopeParams, cache: Tensor, metadata: AttentionMetadata
    ) -> Tensor:
        """Norm, rotate and store kv [T, L + R]. Return q [T, H, any + R] with its last R elements rotated. May
        overwrite q.
        """

    @abstractmethod
    def select_keys(
        self,
        q: Tensor,
        k: Tensor,
        weights: Tensor,
        params: KeySelectionParams,
        cache: Tensor,
        metadata: AttentionMetadata,
    ) -> Tensor:
        """Norm, rotate and store index keys k [T, D]. For each token, return the positions of the top_k keys with the
        highest scores up to the token: [T, top_k] int32, ascending, padded with -1 if there are fewer keys.

        q [T, heads * D] is not yet rotated, and may be overwritten; weights [T, heads]. Of keys with equal scores, the
        earliest are chosen. A row does not depend on the batch, chunks or block ids.
        """

    @abstractmethod
    def sparse_attention(
        self, q: Tensor, cache: Tensor, selected: Tensor, metadata: AttentionMetadata, softmax: AttentionParams
    ) -> Tensor:
        """Compute paged_attention over latents (`AttentionParams.value_dim`), where a query sees only the keys in
        `selected`.
        """

    @abstractmethod
    def short_conv(self, bcx: Tensor, conv: ShortConv, columns: ConvStates, metadata: AttentionMetadata) -> Tensor:
        """Convolve bcx [T, 3 * channels], or x [T, channels] without gates, to [T, channels], and store all columns. A
        sequence may start from columns that an earlier sequence of the step stores.
        """

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
        """Run `rule` on inputs [T, rule.input_dim], gates z [T, heads * value] and head_inputs [T,
        rule.head_inputs_dim]. Return [T, heads * value] and update the states.
        """

    @abstractmethod
    def concat_columns(self, x: Tensor, y: Tensor) -> Tensor:
        """Concatenate [T, A] and [T, B] to [T, A + B]."""

    @abstractmethod
    def cast(self, x: Tensor, dtype: torch.dtype) -> Tensor: ...

    @abstractmethod
    def sigmoid_mul(self, x: Tensor, gate: Tensor) -> Tensor:
        """Return x [T, F] * sigmoid(gate) for gate [T, G]. A gate covers F / G consecutive columns. May overwrite x."""


LayerFunction = Callable[[Operations, Tensor, Tensor | None, AttentionMetadata], tuple[Tensor, Tensor]]
RecordedLayers = Callable[[Tensor, Tensor | None, AttentionMetadata, range], tuple[Tensor, Tensor]]
"""The residual passed in and the one returned are not yet added to x [T, hidden]. Without a residual, x is the
embeddings. May overwrite both inputs.
"""


class Backend(Operations):
    name: str
    block_size: int
    """Tokens per KV block."""
    skips_negative_slots = False
    """If True, slots below 0 (other ranks' tokens) store nothing. If False, such tokens need slots in a
    scratch block.
    """
    keeps_weights_quantized: bool
    """If False, quantized weights are dequantized at load."""
    cuda_graph_support: CudaGraphSupport  # "decodes": one token per sequence, no MoE and no recurrent state
    passed_chunk_trial = False
    """Whether recurrences may be computed in chunks on this GPU. Hopper needs no trial."""

    def make_context_parallel_backend(self, ranks: int) -> Backend | None:
        """Create a backend for ranks that each hold an equal part of every block."""
        return None

    def chunked_recurrence_backend(self) -> Backend | None:
        """The backend, this or one within, that computes recurrences in chunks; None if none does, as with
        --deterministic.
        """
        return None

    @abstractmethod
    def description(self) -> str:
        """Library, version and instruction set for the log."""

    @abstractmethod
    def unsupported_reason(
        self, device: torch.device, dtype: torch.dtype, head_dim: int, softcap: bool = False
    ) -> str | None:
        """The reason is one line, with a remedy. Call no other method unless this returns None."""

    def unsupported_kv_dtype_reason(self, kv_dtype: torch.dtype) -> str | None:
        return None

    def unsupported_attention_reason(self, *, sinks: bool, latents: bool, chunks: bool) -> str | None:
        """For AttentionParams' sinks, value_dim and has_chunked_window. Sparse attention is computed only on CPUs."""
        return None

    @abstractmethod
    def is_batch_invariant(self, device: torch.device, dtype: torch.dtype) -> bool:
        """True if tests show that a row has the same bits in every batch."""

    @abstractmethod
    def kv_cache_shape(self, num_blocks: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> tuple[int, ...]:
        """Return the shape of one layer's key cache, and of its value cache. The first axis is the block.

        dtype: of q, k and v, or one of QUANTIZED_KV_DTYPES. A block has block_size * K * (D +
        num_scale_elements(dtype)) elements. Blocks of more than 16 tokens are ordered by tokens, so that their first
        tokens can be copied.
        """

    @abstractmethod
    def store_kv(
        self, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor, scales: KVScales = UNIT_KV_SCALES
    ) -> None:
        """Store k and v [T, K, D] at slots [T]. They are quantized if the caches are."""

    @abstractmethod
    def clamp_silu_mul(self, gate_up: Tensor, clamp: ClampedSwiGLU) -> Tensor:
        """Like silu_mul, but with the limits of `ClampedSwiGLU`."""

    @abstractmethod
    def pack_linear(self, weight: Tensor, bias: Tensor | None, *, wide: bool = False) -> Linear:
        """weight [out, in] may be freed afterwards. If wide, the result is float32."""

    @abstractmethod
    def pack_per_head_linear(self, weights: Sequence[Tensor], passthrough_dim: int) -> Linear:
        """Return a linear from [T, B * (in + passthrough)] to [T, B * (out + passthrough)] with B weights [out, in]."""

    @abstractmethod
    def pack_quantized(
        self, weights: Sequence[QuantizedWeight], bias: Tensor | None, *, dtype: torch.dtype, wide: bool = False
    ) -> Linear:
        """Fuse weights that share an input into one linear. The weights may be freed afterwards. If x is rounded to
        integers, a row's rounding does not depend on other rows. If wide, the result is float32.
        """

    @abstractmethod
    def pack_quantized_embedding(
        self, weight: QuantizedWeight, *, dtype: torch.dtype, tied: bool
    ) -> QuantizedEmbedding:
        """weight [vocab, hidden] may be freed afterwards. If tied, it is also the LM head."""

    def stacks_experts(self, device: torch.device, dtype: torch.dtype) -> bool:
        """True if experts' weights should be consecutive parts of one tensor, which a library multiplies at once."""
        return False

    @abstractmethod
    def make_moe(self, experts: MoEComponents) -> MoE: ...

    @abstractmethod
    def make_linear_with_lora(self, linear: Linear, slots: AdapterSlotSpec) -> LinearWithLora:
        """Raises ValueError if this backend cannot serve adapters."""

    @abstractmethod
    def fit_int4(self, groups: Tensor, *, zero_points: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Quantize weights [n, 32] to codes [n, 16] uint8 (see GroupedWeight), float32 scales [n] and offsets [n], so
        that weight = scale * (code - 8) + offset.

        With zero_points, the third tensor has integer zero points from 0 to 15, weight = scale * (code - zero), and
        scales fit bfloat16.
        """

    def record_layers(
        self, layers: Sequence[LayerFunction], hidden: int, dtype: torch.dtype, *, starts: bool, groups: int
    ) -> RecordedLayers | None:
        """Return one call that runs any range of `layers` with the same bits. The residual stream is [T, hidden] in
        `dtype`. If `starts`, the first layer begins it, so this layer gets no residual. groups: number of block tables
        in the metadata.
        """
        return None

    def create_rank_memory(self, count: int, row_bytes: int) -> int | None:
        """Return a file descriptor of memory that `count` processes of one machine inherit. row_bytes: bytes of the
        longest row to gather.
        """
        return None

    @abstractmethod
    def make_collective(self, descriptor: int, rank: int, count: int, parent: int = 0) -> Collective:
        """Join a collective in the memory of `descriptor`, which may be closed afterwards. Waits raise RankEnded once
        the parent process is not `parent` (0: any).
        """

    @abstractmethod
    def argmax(self, logits: Tensor) -> Tensor:
        """Return the index of each row's first maximum: [R, vocab] to [R] int64."""

    @abstractmethod
    def sample_tokens(self, logits: Tensor, filters: Tensor, u: Tensor) -> Tensor:
        """Sample tokens [R] int64 from logits [R, vocab] float32.

        filters [R, 4] float64: temperature (above 0), top_k (1 to vocab), top_p, min_p. Top-k, then top-p among the
        remaining tokens (Holtzman et al., 2020), then min-p keep all logits from a threshold up, so equal logits stay
        together. The sample is the first kept token at which the cumulative probability exceeds u [R] float64 in [0, 1)
        times the kept total.
        """
