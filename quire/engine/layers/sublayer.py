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
    """The first axis is the KV block or slot. Blocks of more than 16 tokens are [blocks, tokens, ...] or [blocks,
    pieces, ...], so that prefixes can be copied.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def total_bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class BuildContext:
    backend: Backend
    scheme: QuantizationScheme
    hidden_size: int
    dtype: torch.dtype
    kv_dtype: torch.dtype
    device: torch.device
    max_model_len: int
    kv_scales: Mapping[str, KVScales] = field(default_factory=dict)
    """By layer name. Scales of layers that are missing are 1."""
    adapters: AdapterManager | None = None
    """If None, linears get no room for adapters."""
    shard: ModelShard = UNSHARDED
    expert_packing: tuple[Backend, QuantizationScheme] | None = None
    """Set only if experts are packed differently from other weights."""
    make_linear: Callable[..., Projection] = FusedLinear
    position_tables: dict[str, Tensor] = field(default_factory=dict)
    shared_linears: dict[str, FusedLinear] = field(default_factory=dict)
    """Linears that several layers share, by the name of the first use."""

    @property
    def attention_dtype(self) -> torch.dtype:
        return self.dtype if self.kv_dtype in QUANTIZED_KV_DTYPES else self.kv_dtype

    def rope_table(self, rope: dict[str, Any], head_dim: int) -> Tensor:
        key = f"{head_dim} {rope}"
        if key not in self.position_tables:
            self.position_tables[key] = rope_table(rope, head_dim, self.max_model_len).to(self.device)
        return self.position_tables[key]

    def query_scales(self, query_scaling: QueryScaling) -> Tensor:
        key = f"scales {query_scaling}"
        if key not in self.position_tables:
            self.position_tables[key] = query_scales(query_scaling, self.max_model_len).to(self.device)
        return self.position_tables[key]

    def alibi_table(self, factor: float, heads: int, rank_heads: range) -> Tensor:
        key = f"alibi {factor} {heads}"
        if key not in self.position_tables:
            all_heads = factor * alibi_bias_table(heads, self.max_model_len)
            self.position_tables[key] = all_heads[rank_heads.start : rank_heads.stop].contiguous().to(self.device)
        return self.position_tables[key]


@dataclass(frozen=True, slots=True)
class ForwardContext:
    metadata: AttentionMetadata
    cache: LayerCache
    selected_rows: Tensor | None
    """Indices of tokens needed after the last stateful sublayer; None means all."""
    per_layer_inputs: Tensor | None = None
    """[T, W]."""

    @property
    def linear_context(self) -> LinearContext:
        return self.metadata.linear_context

    def context_of_selected_rows(self, rows: Tensor) -> ForwardContext:
        per_layer_inputs = None if self.per_layer_inputs is None else self.per_layer_inputs[rows]
        return ForwardContext(
            replace(self.metadata, linear_context=self.linear_context.select_rows(rows)),
            self.cache,
            None,
            per_layer_inputs,
        )


@dataclass(frozen=True, slots=True)
class SmoothableNorm:
    norm_name: str
    weight_offset: float
    linears: tuple[FusedLinear, ...]


class Sublayer(ABC):
    @abstractmethod
    def parameters(self) -> ParameterTable:
        """Returns parameters by checkpoint name."""

    def process_weights_after_loading(self) -> None:
        return None

    def smoothable_norms(self) -> tuple[SmoothableNorm, ...]:
        """Returns norms, each with the linears that are its only readers."""
        return ()

    def block_tensor_specs(self, num_blocks: int) -> tuple[CacheTensorSpec, ...]:
        return ()

    @property
    def num_block_tensors(self) -> int:
        return len(self.block_tensor_specs(1))

    def slot_tensor_specs(self, num_slots: int, num_drafts: int) -> tuple[CacheTensorSpec, ...]:
        """`num_drafts`: how many tokens of a step may be rejected later."""
        return ()

    @property
    def block_bytes_formula(self) -> str:
        return "0"

    @abstractmethod
    def forward(
        self, ops: Operations, x: Tensor, residual: Tensor | None, step: ForwardContext
    ) -> tuple[Tensor, Tensor]:
        """Returns output and residual stream, which are not added yet, for x [T, hidden]. If `residual` is None, x are
        the embeddings. Stores the state of all T tokens.
        """


def compute_attention(
    ops: Operations,
    shard: ModelShard,
    q: Tensor,
    caches: tuple[Tensor, Tensor],
    metadata: AttentionMetadata,
    params: AttentionParams,
) -> Tensor:
    """`q` [T, H, D] has this rank's heads."""
    if shard.is_context_parallel:
        assert shard.group is not None
        return ops.context_parallel_attention(q, caches, metadata, params, shard.group)
    return ops.paged_attention(q, *caches, metadata, params)


def activate_gate_up(ops: Operations, gate_up: Tensor, down: FusedLinear, *, gelu: bool = False) -> Activations:
    """Quantizes the result if its only reader, `down`, accepts that."""
    if (rounding := choose_rounding_and_needs_unrounded((down.packed_linear,), gate_up)) is not None:
        form, whole = rounding
        return form.gate_and_round(gate_up, gelu=gelu, whole=whole)
    return ops.gelu_mul(gate_up) if gelu else ops.silu_mul(gate_up)


def scale_tensor(ops: Operations, x: Tensor, factor: float) -> Tensor:
    """May overwrite x."""
    return x if factor == 1 else ops.apply_activation(x, Activation("times", slope=factor))
