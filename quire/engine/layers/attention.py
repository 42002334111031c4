"""Grouped-query attention (Ainslie et al., 2023)."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from quire.engine.architecture.attention import AttentionLayerSpec
from quire.engine.architecture.norm import NormSpec
from quire.engine.architecture.rope import parse_query_scaling
from quire.engine.layers.linear import FusedLinear
from quire.engine.layers.parameters import ParameterTable, make_row_slicer, merge_parameters
from quire.engine.layers.sublayer import (
    BuildContext,
    CacheTensorSpec,
    ForwardContext,
    SmoothableNorm,
    Sublayer,
    compute_attention,
    scale_tensor,
)
from quire.engine.layers.sublayer_shapes import SublayerShapes
from quire.kernels.attention_params import AttentionParams
from quire.kernels.backend import Operations
from quire.kernels.kv_quantization import UNIT_KV_SCALES, num_scale_elements
from quire.kernels.qk_norm_rope import QKNormRopeParams
from quire.kernels.quantized_tensors import Activations


class PagedKVSublayer(Sublayer):
    def __init__(self, spec: AttentionLayerSpec, build_context: BuildContext, kv_heads: int) -> None:
        self._spec = spec
        self._build_context = build_context
        self._kv_heads = kv_heads

    def block_tensor_specs(self, num_blocks: int) -> tuple[CacheTensorSpec, ...]:
        if self._spec.kv_source_layer is not None:
            return ()
        kind = self._build_context.kv_dtype
        shape = self._build_context.backend.kv_cache_shape(num_blocks, self._kv_heads, self._spec.head_dim, kind)
        return CacheTensorSpec(shape, kind), CacheTensorSpec(shape, kind)

    @property
    def num_block_tensors(self) -> int:
        return 2

    @property
    def block_bytes_formula(self) -> str:
        dim = self._spec.head_dim
        kind = self._build_context.kv_dtype
        scale_size = num_scale_elements(self._build_context.kv_dtype)
        head = f"({dim} + {scale_size})" if scale_size else f"{dim}"
        tokens = self._build_context.shard.context_shard(self._build_context.backend.block_size).tokens_per_page
        return f"2 x {tokens} tokens x {self._kv_heads} heads x {head} x {kind.itemsize} B"


class Attention(PagedKVSublayer):
    def __init__(self, spec: AttentionLayerSpec, build_context: BuildContext, layer: str) -> None:
        shard = build_context.shard
        dim = spec.head_dim
        self._shapes = shapes = SublayerShapes(spec.parameter_shapes(layer, build_context.hidden_size), build_context)
        heads, kv_heads = shard.rank_span(spec.num_heads), shard.kv_head_span(spec.num_kv_heads)
        super().__init__(spec, build_context, len(kv_heads))
        self._kv_scales = build_context.kv_scales.get(layer, UNIT_KV_SCALES)
        self._cos_sin = None if spec.rope is None else build_context.rope_table(spec.rope, dim)
        self._axis_indices: Tensor | None = None
        if spec.mrope_axes is not None:
            rest = dim // 2 - len(spec.mrope_axes)  # frequencies that are not rotated
            self._axis_indices = torch.tensor([*spec.mrope_axes, *[0] * rest] * 2, device=build_context.device)
        self._prefix = prefix = f"{layer}.self_attn"
        q, k, v, out = (f"{prefix}.{name}_proj" for name in "qkvo")
        query_slice, kv_slice = shard.head_slice(heads, dim), shard.head_slice(kv_heads, dim)
        slices = {q: query_slice, k: kv_slice, v: kv_slice}
        projected = [name for name in (q, k, v) if name in shapes]
        kinds: dict[int, Literal["all", "keys", "queries"]] = {3: "all", 2: "keys", 1: "queries"}
        self._projections = kinds[len(projected)]
        self._qkv = shapes.make_projection(projected, {name: slices[name] for name in projected})
        gate, gate_slice = f"{prefix}.gate_proj", query_slice if spec.has_output_gate else shard.head_slice(heads, 1)
        self._gate = shapes.make_projection([gate], {gate: gate_slice}) if gate in shapes else None
        self._out = shapes.make_projection([out], {out: shard.input_slice(shapes.in_features(out))})
        self._input_norm, self._output_norm = f"{layer}.input_layernorm", f"{layer}.post_attention_layernorm"
        self._norms = shapes.make_norms((self._input_norm, self._output_norm), spec.norm)
        input_linears = (self._qkv,) if self._gate is None else (self._qkv, self._gate)
        self._input_linears = tuple(linear for linear in input_linears if isinstance(linear, FusedLinear))
        rms = NormSpec(spec.norm.eps, spec.norm.weight_offset)
        self._head_norms = shapes.make_norms((f"{prefix}.q_norm", f"{prefix}.k_norm"), rms)
        self._weights: dict[str, Tensor] = {}
        alibi_heads = range(spec.num_heads) if shard.is_context_parallel else heads
        self._alibi_bias = (
            None if spec.alibi is None else build_context.alibi_table(spec.alibi, spec.num_heads, alibi_heads)
        )

    def parameters(self) -> ParameterTable:
        table = merge_parameters(self._norms, self._head_norms, self._qkv, self._out, self._gate)
        heads = make_row_slicer(self._build_context.shard.rank_span(self._spec.num_heads))
        return table | self._shapes.make_parameters(self._weights, self._prefix, ["sinks"], heads)

    def smoothable_norms(self) -> tuple[SmoothableNorm, ...]:
        if not self._spec.input_norm or self._spec.input_size is not None:
            return ()
        return (SmoothableNorm(self._input_norm, self._spec.norm.weight_offset, self._input_linears),)

    def forward(
        self, ops: Operations, x: Tensor, residual: Tensor | None, step: ForwardContext
    ) -> tuple[Tensor, Tensor]:
        normed: Activations = x
        if self._spec.input_size is None:
            normed, residual = self._norms.norm_for_linears(self._input_linears, ops, self._input_norm, x, residual)
        assert residual is not None
        metadata = step.metadata
        context = step.linear_context
        k_cache, v_cache = step.cache
        gate = None if self._gate is None else self._gate.project(ops, normed, context)
        rope, rope_metadata = self.rope_params, metadata
        if metadata.mrope_positions is not None and self._spec.mrope_axes is not None:
            rope, rope_metadata = (
                self._rope_params_at_mrope_positions(metadata.mrope_positions),
                replace(metadata, rope_position_override=torch.arange(len(x), device=x.device)),
            )
        qkv = ops.cast(self._qkv.project(ops, normed, context), self._build_context.attention_dtype)
        q = ops.rope_and_store_kv(qkv, rope, k_cache, v_cache, rope_metadata)
        attended = compute_attention(
            ops, self._build_context.shard, q, (k_cache, v_cache), metadata, self._attention_params
        )
        if (spans := metadata.bidirectional_spans) is not None and self._spec.uses_bidirectional_spans:
            both_ways = replace(self._attention_params, lookahead=None)
            attended[spans.token_indices] = ops.paged_attention(
                q[spans.token_indices], k_cache, v_cache, spans.metadata, both_ways
            )
        attended = ops.cast(attended.flatten(1), self._build_context.dtype)
        if step.selected_rows is not None:
            attended = attended[step.selected_rows]
            residual = residual[step.selected_rows]
            context = context.select_rows(step.selected_rows)
            gate = None if gate is None else gate[step.selected_rows]
        if gate is not None:
            attended = ops.sigmoid_mul(attended, gate)
        x = ops.all_reduce(self._out.project(ops, attended, context), self._build_context.shard.group)
        return self._norms.apply_norm(ops, self._output_norm, scale_tensor(ops, x, self._spec.output_scale)), residual

    @cached_property
    def rope_params(self) -> QKNormRopeParams:
        """Requires loaded weights."""
        spec, (q_norm, k_norm) = (
            self._spec,
            (self._head_norms.get_weight(f"{self._prefix}.{name}_norm") for name in "qk"),
        )
        query_scaling = (
            parse_query_scaling(spec.rope)
            if spec.query_scaling is None and spec.rope is not None
            else spec.query_scaling
        )
        scale, ones = None, torch.ones(spec.head_dim, device=self._build_context.device)
        if query_scaling is not None:
            scale = self._build_context.query_scales(query_scaling)
        if spec.qk_norm == "unit":
            q_norm = k_norm = ones
        kind = "after" if spec.qk_norm == "unit" else spec.qk_norm or "heads"
        extras = (self._kv_scales, kind, scale, ones if spec.v_norm else None, self._projections)
        return QKNormRopeParams(spec.head_dim, self._cos_sin, q_norm, k_norm, spec.norm.eps, *extras)

    def _rope_params_at_mrope_positions(self, axes: Tensor) -> QKNormRopeParams:
        """`axes` [T, 3] are three coordinates per token, of which each frequency uses one. If all three are equal, the
        bits are the same as with a single position.
        """
        assert self._cos_sin is not None
        return replace(self.rope_params, cos_sin=self._cos_sin.gather(0, axes[:, self._axis_indices]))

    @cached_property
    def _attention_params(self) -> AttentionParams:
        spec = self._spec
        assert ("sinks" in self._weights) == spec.sinks, "weights are not loaded"
        params = (spec.scale, spec.window, spec.softcap, spec.lookahead, self._alibi_bias, self._kv_scales)
        return AttentionParams(*params, sinks=self._weights.get("sinks"), has_chunked_window=spec.chunked)
