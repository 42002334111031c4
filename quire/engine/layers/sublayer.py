"""What every part of a decoder's layer says of itself: its parameters, the state that it keeps of each sequence, and
its steps, in the kernels' own operations. A layer is a tuple of specs, each of which makes its part."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from quire.engine.architecture.rope import QueryScaling
from quire.engine.layers.adapters import AdapterManager
from quire.engine.layers.linear import FusedLinear, Projection
from quire.engine.layers.parameters import ParameterTable
from quire.engine.layers.rope import alibi_bias_table, query_scales, rope_table
from quire.engine.layers.schemes import QuantizationScheme
from quire.engine.layers.shard import UNSHARDED, ModelShard
from quire.kernels.attention_params import AttentionParams
from quire.kernels.backend import AttentionMetadata, Backend, LayerCache, LinearContext, Operations
from quire.kernels.kv_quantization import QUANTIZED_KV_DTYPES, KVScales
from quire.kernels.parameters.activation import Activation
from quire.kernels.quantized_tensors import Activations, choose_rounding_and_needs_unrounded


@dataclass(frozen=True, slots=True)
class CacheTensorSpec:
    """One tensor of a layer's pages, or slots; the first axis is the page, or slot. Pages of more than 16 tokens are
    [pages, tokens, ...], or [pages, pieces of as many tokens, ...], so that the beginning of a page can be copied."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def total_bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class BuildContext:
    """What all parts of a model are made with, beside their own specs."""

    backend: Backend
    scheme: QuantizationScheme
    hidden_size: int
    dtype: torch.dtype
    kv_dtype: torch.dtype
    """What pages hold."""
    device: torch.device
    max_model_len: int
    kv_scales: Mapping[str, KVScales] = field(default_factory=dict)
    """By the layer's name, of pages that hold 8-bit floats, where it is not 1."""
    adapters: AdapterManager | None = None
    """Where linears get room for some, if they do."""
    shard: ModelShard = UNSHARDED
    """Whose part of each layer it is."""
    expert_packing: tuple[Backend, QuantizationScheme] | None = None
    """What packs routed experts, where it is not what packs all else."""
    make_linear: Callable[..., Projection] = FusedLinear
    """What makes attention's linears, of FusedLinear's arguments."""
    position_tables: dict[str, Tensor] = field(default_factory=dict)
    """Those of positions, which layers share."""
    shared_linears: dict[str, FusedLinear] = field(default_factory=dict)
    """Linears whose weights several layers have, by the name of the first one's part."""

    @property
    def attention_dtype(self) -> torch.dtype:
        """In which attention computes: what pages hold, where these are no codes."""
        return self.dtype if self.kv_dtype in QUANTIZED_KV_DTYPES else self.kv_dtype

    def rope_table(self, rope: dict[str, Any], head_dim: int) -> Tensor:
        key = f"{head_dim} {rope}"
        if key not in self.position_tables:
            self.position_tables[key] = rope_table(rope, head_dim, self.max_model_len).to(self.device)
        return self.position_tables[key]

    def query_scales(self, query_scaling: QueryScaling) -> Tensor:
        """What queries are multiplied by, by position."""
        key = f"scales {query_scaling}"
        if key not in self.position_tables:
            self.position_tables[key] = query_scales(query_scaling, self.max_model_len).to(self.device)
        return self.position_tables[key]

    def alibi_table(self, factor: float, heads: int, rank_heads: range) -> Tensor:
        """AttentionParams.relative_bias of the `rank_heads` among so many heads."""
        key = f"alibi {factor} {heads}"
        if key not in self.position_tables:
            all_heads = factor * alibi_bias_table(heads, self.max_model_len)
            self.position_tables[key] = all_heads[rank_heads.start : rank_heads.stop].contiguous().to(self.device)
        return self.position_tables[key]


@dataclass(frozen=True, slots=True)
class ForwardContext:
    """What the parts of a layer must know of a step."""

    metadata: AttentionMetadata
    cache: LayerCache
    """What the layer keeps of sequences, in pages and in slots."""
    selected_rows: Tensor | None
    """What comes behind the layer's state is wanted of these tokens alone, so the part that keeps it drops the others
    once they are kept; None: of all."""
    per_layer_inputs: Tensor | None = None
    """[T, W], what layers read of tokens beside the stream, as AttentionMetadata has it."""

    @property
    def linear_context(self) -> LinearContext:
        return self.metadata.linear_context

    def context_of_selected_rows(self, rows: Tensor) -> ForwardContext:
        """For the parts behind the one that has dropped all others."""
        per_layer_inputs = None if self.per_layer_inputs is None else self.per_layer_inputs[rows]
        return ForwardContext(
            replace(self.metadata, linear_context=self.linear_context.select_rows(rows)),
            self.cache,
            None,
            per_layer_inputs,
        )


@dataclass(frozen=True, slots=True)
class SmoothableNorm:
    """A norm and the linears of a part that read what it gives."""

    norm_name: str
    """Its name in the checkpoint."""
    weight_offset: float
    """Added to its weights, as NormSpec has it."""
    linears: tuple[FusedLinear, ...]


class Sublayer(ABC):
    """Fill it by way of `parameters()` before use."""

    @abstractmethod
    def parameters(self) -> ParameterTable:
        """Every tensor that it takes, by its name in the checkpoint."""

    def process_weights_after_loading(self) -> None:
        """All tensors were put."""
        return None

    def smoothable_norms(self) -> tuple[SmoothableNorm, ...]:
        """Norms that nothing of this part reads but the linears named beside each; norms of which that cannot be said
        are left out."""
        return ()

    def block_tensor_specs(self, num_blocks: int) -> tuple[CacheTensorSpec, ...]:
        """What keeps its state, for so many pages; (): it keeps none."""
        return ()

    @property
    def num_block_tensors(self) -> int:
        """How many tensors of pages its layer has for it: those that it keeps, or another layer's."""
        return len(self.block_tensor_specs(1))

    def slot_tensor_specs(self, num_slots: int, num_drafts: int) -> tuple[CacheTensorSpec, ...]:
        """The same for so many slots, each of which keeps what is not in pages of one sequence; a step computes up to
        so many drafts of it, which may turn out wrong."""
        return ()

    @property
    def block_bytes_formula(self) -> str:
        """The bytes of a page, as a product."""
        return "0"

    @abstractmethod
    def forward(
        self, ops: Operations, x: Tensor, residual: Tensor | None, step: ForwardContext
    ) -> tuple[Tensor, Tensor]:
        """Returns (output, residual stream), not yet added, for x [T, hidden] and the stream to add it to (None: x is
        the embeddings). Keeps the state of all T tokens."""


def compute_attention(
    ops: Operations,
    shard: ModelShard,
    q: Tensor,
    caches: tuple[Tensor, Tensor],
    metadata: AttentionMetadata,
    params: AttentionParams,
) -> Tensor:
    """Operations.paged_attention of this rank's heads q [T, H, D], whoever keeps which keys and values."""
    if shard.is_context_parallel:
        assert shard.group is not None
        return ops.context_parallel_attention(q, caches, metadata, params, shard.group)
    return ops.paged_attention(q, *caches, metadata, params)


def activate_gate_up(ops: Operations, gate_up: Tensor, down: FusedLinear, *, gelu: bool = False) -> Activations:
    """Operations.silu_mul, or gelu_mul, as the linear that alone reads it takes it."""
    if (rounding := choose_rounding_and_needs_unrounded((down.packed_linear,), gate_up)) is not None:
        form, whole = rounding
        return form.gate_and_round(gate_up, gelu=gelu, whole=whole)
    return ops.gelu_mul(gate_up) if gelu else ops.silu_mul(gate_up)


def scale_tensor(ops: Operations, x: Tensor, factor: float) -> Tensor:
    """x * factor; may overwrite x."""
    return x if factor == 1 else ops.apply_activation(x, Activation("times", slope=factor))
