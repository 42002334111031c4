"""Tests compare each backend with `ReferenceBackend`."""

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
CudaGraphSupport = Literal["steps", "decodes", "nothing"]  # what a CUDA graph can hold
LayerCache = tuple[Tensor, ...]


@dataclass(frozen=True, slots=True)
class LinearContext:
    adapter_slots: Tensor | None = None  # [rows] int64; None: no row has an adapter
    row_order: Tensor | None = None  # [rows] int64, GPU only: row indices sorted by adapter

    @classmethod
    def from_adapter_slots(cls, adapter_slots: Tensor) -> LinearContext:
        """CUDA graphs can record this."""
        return cls(adapter_slots, torch.argsort(adapter_slots, stable=True) if adapter_slots.is_cuda else None)

    def select_rows(self, rows: Tensor) -> LinearContext:
        return self if self.adapter_slots is None else self.from_adapter_slots(self.adapter_slots[rows])


NO_ADAPTERS = LinearContext()
Linear = Callable[[Tensor, LinearContext], Tensor]
"""[rows, in_features] to [rows, out_features]."""


@dataclass(frozen=True, slots=True)
class LoraDelta:
    """Added to some outputs of a linear: x @ down.T @ up.T (LoRA, Hu et al., 2021)."""

    first_output: int
    """A delta stays within one of the fused linears. Deltas do not overlap."""
    down: Tensor
    """[rank, in_features] in the model's dtype."""
    up: Tensor
    """[outs, rank] in the model's dtype, times the adapter's scale."""


@dataclass(frozen=True, slots=True)
class AdapterSlotSpec:
    num_slots: int
    """Slots 1 to num_slots. Slot 0: no adapter."""
    in_features: int
    output_sizes: tuple[int, ...]
    """Outputs of the fused linears, in order."""
    max_rank: int
    dtype: torch.dtype
    has_float32_output: bool
    device: torch.device


class LinearWithLora(ABC):
    """Rows without an adapter keep the linear's exact bits. No row depends on others."""

    @abstractmethod
    def __call__(self, x: Tensor, context: LinearContext) -> Tensor:
        """See `Linear`."""

    @abstractmethod
    def pack_one_adapter(self, deltas: Sequence[LoraDelta]) -> Any:
        """Thread-safe."""

    @abstractmethod
    def put_adapter(self, slot: int, packed: Any) -> None:
        """Takes effect at the next call. None clears the slot."""


@dataclass(frozen=True, slots=True)
class QuantizedEmbedding:
    embed_tokens: Callable[[Tensor], Tensor]
    """Token ids [T] to [T, hidden] in the model's dtype."""
    lm_head: Linear | None
    """[R, hidden] to [R, vocab] float32; None: not tied."""


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """T tokens of S sequences in a step, on the model's device.

    Tokens query_start[s] to query_start[s + 1] are the last ones of sequence s, whose KV is in the blocks of
    block_table[s].
    """

    query_start: Tensor  # [S + 1] int32, cumulative
    context_lens: Tensor  # [S] int32, keys, including this step's
    key_start: Tensor  # [S + 1] int32, cumulative context_lens
    block_table: Tensor  # [S, max blocks] int32, padded with any valid block id
    positions: Tensor  # [T] int64, absolute
    slot_mapping: Tensor  # [T] int64, block id * block size + offset
    max_query_len: int
    max_context_len: int
    linear_context: LinearContext = NO_ADAPTERS
    is_full_prefill: bool = False  # all keys are from this step
    other_groups: tuple[AttentionMetadata, ...] = ()
    """KV cache groups 1 and up. Block table entries before a sliding window are not this sequence's."""
    state_slots: Tensor | None = None  # [S] int64; None: no recurrent state
    state_and_verified_counts: StateAndVerifiedCounts | None = None  # None: no draft tokens in this step or the last
    rope_position_override: Tensor | None = None  # [T] int64; None: `positions`
    mrope_positions: Tensor | None = None  # [T, 3] int64: time, row and column in an image; None: all equal
    bidirectional_spans: BidirectionalSpans | None = None  # None: attention is causal
    per_layer_inputs: Tensor | None = None  # [T, W], additional input of layers
    recurrence_metadata: RecurrenceMetadata | None = None  # None: attention's sequences
    decode_prefill_parts: tuple[AttentionMetadata, ...] = ()  # of a mixed batch: kernels/gpu/prefill_decode_split.py
    query_key_lens: tuple[tuple[int, int], ...] = ()  # (queries, keys) of each sequence; (): unknown on the host

    def with_block_tables(self, tables: Sequence[Tensor], slot_mappings: Sequence[Tensor]) -> AttentionMetadata:
        """One block table and slot mapping per KV cache group, the first for group 0."""
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
    """Spans of prompts whose tokens also see later tokens of the span. Each span ends in this step."""

    token_indices: Tensor  # [P] int64, indices among the step's tokens
    metadata: AttentionMetadata  # of the P tokens: one sequence per span, ending with it


class Operations(ABC):
    """Run at once, or recorded by `Backend.record_layers`. T tokens, H query heads, K KV heads, D head_dim."""

    @abstractmethod
    def apply_linear(self, linear: Linear, x: Activations, context: LinearContext) -> Tensor:
        """Must not change x."""

    @abstractmethod
    def run_moe(self, moe: MoE, x: Tensor, router_input: Tensor) -> Tensor:
        """Must not change x and router_input, which may be the same tensor."""

    @abstractmethod
    def all_reduce(self, x: Tensor, group: Collective | None) -> Tensor:
        """Sum over ranks; x itself without a group. May overwrite x."""

    @abstractmethod
    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x / sqrt(mean(x^2) + eps) * weight over the last axis (Zhang and Sennrich, 2019), float32 with float32
        weights.
        """

    @abstractmethod
    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """(rms_norm(x + residual), x + residual), all [T, hidden]. May overwrite x and residual."""

    @abstractmethod
    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        """(x - mean) / sqrt(variance + eps) * weight + bias (Ba et al., 2016); dtypes as in rms_norm."""

    @abstractmethod
    def add_layer_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """add_rms_norm with layer_norm."""

    @abstractmethod
    def add_residual(self, x: Tensor, residual: Tensor) -> Tensor:
        """May overwrite residual."""

    @abstractmethod
    def add_gated(self, x: Tensor, gate: Tensor, residual: Tensor) -> Tensor:
        """x * sigmoid(gate) + residual for x [T, F] and gate [T, 1]. May overwrite residual."""

    @abstractmethod
    def apply_activation(self, x: Tensor, activation: Activation) -> Tensor:
        """May overwrite x."""

    @abstractmethod
    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """silu(gate) * up for gate_up [T, 2 * F], gate first: [T, F]."""

    @abstractmethod
    def gelu_mul(self, gate_up: Tensor) -> Tensor:
        """silu_mul with tanh-approximated GELU (Hendrycks and Gimpel, 2016)."""

    @abstractmethod
    def mul_by_column_slice(self, x: Tensor, per_layer_inputs: Tensor, first: int) -> Tensor:
        """x [T, F] times columns `first` to `first` + F of `per_layer_inputs` [T, W]. May overwrite x."""

    @abstractmethod
    def rope_and_store_kv(
        self, qkv: Tensor, rope: QKNormRopeParams, k_cache: Tensor, v_cache: Tensor, metadata: AttentionMetadata
    ) -> Tensor:
        """Split qkv [T, (H + 2K) * D], norm and rotate q and k, store k and v, return q [T, H, D]. May overwrite qkv.
        Some `QKNormRopeParams.projections` leave out K or 2K heads.
        """

    @abstractmethod
    def paged_attention(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, metadata: AttentionMetadata, softmax: AttentionParams
    ) -> Tensor:
        """Causal attention of q [T, H, D] over paged KV: [T, H, D], or [T, H, AttentionParams.value_dim].

        Position p sees keys AttentionParams.first_visible_key(p) to p. Query head h reads KV head h // (H / K). Scores
        and sums are float32. A row's bits do not depend on batch, chunks or block ids, except on GPU backends that are
        not deterministic.
        """

    def context_parallel_attention(
        self, q: Tensor, caches: CachePair, metadata: AttentionMetadata, softmax: AttentionParams, group: Collective
    ) -> Tensor:
        """paged_attention for ranks that divide each sequence's tokens. Raises RankEnded.

        q [T, H / ranks, D] and `softmax.sinks` hold this rank's heads, `softmax.relative_bias` all heads, and the
        caches this rank's tokens for all K heads. Bits depend on the number of ranks, except with the CPU kernels.
        """
        raise NotImplementedError

    @abstractmethod
    def rope_and_store_latent_kv(
        self, q: Tensor, kv: Tensor, latent: LatentNormRopeParams, cache: Tensor, metadata: AttentionMetadata
    ) -> Tensor:
        """Norm, rotate and store kv [T, L + R] (see latent_params.py); return rotated q [T, H, any + R]. May overwrite
        q.
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
        """Norm, rotate and store index keys k [T, D]; return the positions of the top_k keys with the highest scores
        among those up to each token: [T, top_k] int32, ascending, then -1.

        q [T, heads * D] is not yet rotated, and may be overwritten; weights [T, heads]. Of equal scores the earliest
        keys are taken. A row does not depend on the batch, chunks or block ids.
        """

    @abstractmethod
    def sparse_attention(
        self, q: Tensor, cache: Tensor, selected: Tensor, metadata: AttentionMetadata, softmax: AttentionParams
    ) -> Tensor:
        """paged_attention of latents (`AttentionParams.value_dim`) that sees only `selected` (see select_keys)."""

    @abstractmethod
    def short_conv(self, bcx: Tensor, conv: ShortConv, columns: ConvStates, metadata: AttentionMetadata) -> Tensor:
        """bcx [T, 3 * channels], or x [T, channels] without gates, to [T, channels]. Stores all columns. A sequence may
        start from columns that an earlier sequence of the step stores.
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
        """inputs [T, rule.input_dim], gates z [T, heads * value] and head_inputs [T, rule.head_inputs_dim] to [T, heads
        * value]. Updates the states.
        """

    @abstractmethod
    def concat_columns(self, x: Tensor, y: Tensor) -> Tensor:
        """[T, A] and [T, B] to [T, A + B]."""

    @abstractmethod
    def cast(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """Convert to dtype."""

    @abstractmethod
    def sigmoid_mul(self, x: Tensor, gate: Tensor) -> Tensor:
        """x [T, F] * sigmoid(gate) for gate [T, G]; each gate covers F / G consecutive columns. May overwrite x."""


LayerFunction = Callable[[Operations, Tensor, Tensor | None, AttentionMetadata], tuple[Tensor, Tensor]]
RecordedLayers = Callable[[Tensor, Tensor | None, AttentionMetadata, range], tuple[Tensor, Tensor]]
"""Runs `range` of layers. Neither the given nor the returned `residual` is yet added to x [T, hidden]; None: x is the
embeddings. May overwrite both inputs.
"""


class Backend(Operations):
    name: str
    block_size: int
    """Tokens per KV block."""
    skips_negative_slots = False
    """Slots below 0 (other ranks' tokens) store nothing. Otherwise such tokens go to a scratch block."""
    keeps_weights_quantized: bool
    """Otherwise weights are dequantized at load."""
    cuda_graph_support: CudaGraphSupport  # "decodes": one token per sequence, no MoE and no recurrent state

    def make_context_parallel_backend(self, ranks: int) -> Backend | None:
        """For ranks that each hold an equal part of every block; None if unsupported."""
        return None

    @abstractmethod
    def description(self) -> str:
        """For the log: library, version, instruction set."""

    @abstractmethod
    def unsupported_reason(
        self, device: torch.device, dtype: torch.dtype, head_dim: int, softcap: bool = False
    ) -> str | None:
        """Why the model cannot be served, with a remedy, in one line. Call no other method unless None."""

    def unsupported_kv_dtype_reason(self, kv_dtype: torch.dtype) -> str | None:
        """As unsupported_reason, for a quantized KV dtype."""
        return None

    def unsupported_attention_reason(self, *, sinks: bool, latents: bool, chunks: bool) -> str | None:
        """For AttentionParams' sinks, value_dim and has_chunked_window. Sparse attention is computed only on CPUs."""
        return None

    @abstractmethod
    def is_batch_invariant(self, device: torch.device, dtype: torch.dtype) -> bool:
        """True if tests show that a row has the same bits in every batch."""

    @abstractmethod
    def kv_cache_shape(self, num_blocks: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> tuple[int, ...]:
        """Shape of one layer's key cache, and of its value cache; the first axis is the block.

        dtype: of q, k and v, or one of QUANTIZED_KV_DTYPES. A block has block_size * K * (D +
        num_scale_elements(dtype)) elements. Blocks of more than 16 tokens are [tokens, ...], so that their first tokens
        can be copied.
        """

    @abstractmethod
    def store_kv(
        self, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor, scales: KVScales = UNIT_KV_SCALES
    ) -> None:
        """Store k, v [T, K, D] at slots [T], quantized if the caches are."""

    @abstractmethod
    def clamp_silu_mul(self, gate_up: Tensor, clamp: ClampedSwiGLU) -> Tensor:
        """silu_mul with the limits of `ClampedSwiGLU`."""

    @abstractmethod
    def pack_linear(self, weight: Tensor, bias: Tensor | None, *, wide: bool = False) -> Linear:
        """x @ weight.T + bias for weight [out, in], which may be freed afterwards. wide: float32 result."""

    @abstractmethod
    def pack_per_head_linear(self, weights: Sequence[Tensor], passthrough_dim: int) -> Linear:
        """[T, B * (in + passthrough)] to [T, B * (out + passthrough)] with B weights [out, in]."""

    @abstractmethod
    def pack_quantized(
        self, weights: Sequence[QuantizedWeight], bias: Tensor | None, *, dtype: torch.dtype, wide: bool = False
    ) -> Linear:
        """Fuse weights that share an input. They may be freed afterwards. If x is rounded to integers, each row is
        rounded by itself. wide: float32 result.
        """

    @abstractmethod
    def pack_quantized_embedding(
        self, weight: QuantizedWeight, *, dtype: torch.dtype, tied: bool
    ) -> QuantizedEmbedding:
        """weight [vocab, hidden] may be freed afterwards. tied: also used as the LM head."""

    @abstractmethod
    def make_moe(self, experts: MoEComponents) -> MoE:
        """For the weighted sum of chosen experts."""

    @abstractmethod
    def make_linear_with_lora(self, linear: Linear, slots: AdapterSlotSpec) -> LinearWithLora:
        """Raises ValueError if this backend cannot serve adapters."""

    @abstractmethod
    def fit_int4(self, groups: Tensor, *, zero_points: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Weights [n, 32] to codes [n, 16] uint8 as in GroupedWeight, float32 scales [n] and offsets [n]: weight =
        scale * (code - 8) + offset.

        With zero_points, weight = scale * (code - zero) with whole zeros from 0 to 15, and scales fit bfloat16.
        """

    def record_layers(
        self, layers: Sequence[LayerFunction], hidden: int, dtype: torch.dtype, *, starts: bool, groups: int
    ) -> RecordedLayers | None:
        """Combine layers into one call with the same bits; None if unsupported. The first layer begins the residual
        stream (hidden, dtype) if `starts`. groups: block tables in the metadata.
        """
        return None

    def create_rank_memory(self, count: int, row_bytes: int) -> int | None:
        """File descriptor of memory that `count` processes of one machine inherit; None if unsupported. row_bytes:
        longest row to gather.
        """
        return None

    @abstractmethod
    def make_collective(self, descriptor: int, rank: int, count: int, parent: int = 0) -> Collective:
        """`descriptor` may be closed afterwards. The process ends with `parent` (0: none)."""

    @abstractmethod
    def argmax(self, logits: Tensor) -> Tensor:
        """Index of each row's first maximum: [R, vocab] to [R] int64."""

    @abstractmethod
    def sample_tokens(self, logits: Tensor, filters: Tensor, u: Tensor) -> Tensor:
        """Logits [R, vocab] float32 to tokens [R] int64.

        filters [R, 4] float64: temperature (above 0), top_k (1 to vocab), top_p, min_p. Top-k, then top-p of the rest
        (Holtzman et al., 2020), then min-p keep logits from a threshold up, so equal logits stay together. Samples the
        first kept token at which the cumulative probability exceeds u [R] float64 in [0, 1) times the kept total.
        """
