"""Kimi Delta Attention (Moonshot AI, 2025)."""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from quire.engine.architecture.norm import NormSpec
from quire.engine.architecture.recurrent import KimiDeltaAttentionSpec
from quire.engine.layers.linear import FusedLinear
from quire.engine.layers.parameters import ParameterTable, make_row_slicer, merge_parameters
from quire.engine.layers.recurrent.mixer import MatrixStateMixer
from quire.engine.layers.shard import FULL_LINEAR
from quire.engine.layers.sublayer import BuildContext, ForwardContext, SmoothableNorm
from quire.kernels.backend import Operations
from quire.kernels.recurrent.delta_rule import DeltaRule
from quire.kernels.recurrent.short_conv import ShortConv

_CONV_WEIGHTS = ("q_conv1d.weight", "k_conv1d.weight", "v_conv1d.weight")


class KimiDeltaAttention(MatrixStateMixer):
    def __init__(self, spec: KimiDeltaAttentionSpec, build_context: BuildContext, layer: str) -> None:
        super().__init__(spec, build_context, layer, "self_attn")
        shard = build_context.shard
        self._spec = spec
        key, value = (shard.head_slice(self._head_span, size) for size in (spec.key_dim, spec.value_dim))
        self._qkv = self._make_linear({"q_proj": key, "k_proj": key, "v_proj": value})
        self._decay_a, self._gate_a = (self._make_linear({f"{name}_a_proj": FULL_LINEAR}) for name in "fg")
        self._decay_b, self._gate_b = self._make_linear({"f_b_proj": key}), self._make_linear({"g_b_proj": value})
        self._beta = self._make_linear({"b_proj": shard.head_slice(self._head_span, 1)})
        self._out = self._make_linear({"o_proj": shard.input_slice(spec.num_heads * spec.value_dim)})
        self._output_norm_name = f"{self._prefix}.o_norm"
        self._output_norms = self._shapes.make_norms([self._output_norm_name], NormSpec(spec.norm.eps))

    @property
    def _input_linears(self) -> tuple[FusedLinear, ...]:
        return self._qkv, self._decay_a, self._gate_a, self._beta

    def parameters(self) -> ParameterTable:
        linears = (*self._input_linears, self._decay_b, self._gate_b, self._out)
        table = merge_parameters(self._norms, self._output_norms, *linears)
        for name, span in zip(_CONV_WEIGHTS, self._channel_spans, strict=True):
            table |= self._make_parameters([name], make_row_slicer(span))
        table |= self._make_parameters(["dt_bias"], make_row_slicer(self._channel_spans[0]))
        return table | self._make_parameters(["A_log"], self._slice_decay_rates)

    def _slice_decay_rates(self, tensor: Tensor) -> Tensor:
        """`tensor` [1, 1, heads, 1]."""
        return tensor.narrow(2, self._head_span.start, len(self._head_span))

    def smoothable_norms(self) -> tuple[SmoothableNorm, ...]:
        return (SmoothableNorm(self._input_norm, self._spec.norm.weight_offset, self._input_linears),)

    def forward(
        self, ops: Operations, x: Tensor, residual: Tensor | None, step: ForwardContext
    ) -> tuple[Tensor, Tensor]:
        context = step.linear_context
        normed, residual = self._norms.norm_for_linears(self._input_linears, ops, self._input_norm, x, residual)
        qkv, low_decay, low_gate, beta = (
            ops.apply_linear(each.packed_linear, normed, context) for each in self._input_linears
        )
        decay = ops.apply_linear(self._decay_b.packed_linear, low_decay, context)
        gate = ops.apply_linear(self._gate_b.packed_linear, low_gate, context)
        head_inputs = ops.concat_columns(beta, decay)
        mixed = self._run_recurrence(ops, self._convolve(ops, qkv, step), gate, head_inputs, step)
        return self._project_output(ops, mixed, residual, step)

    @cached_property
    def conv_params(self) -> ShortConv:
        weight = torch.cat([self._weights[name][:, 0] for name in _CONV_WEIGHTS])
        return ShortConv(weight.t().contiguous(), None, is_gated=False)

    @cached_property
    def recurrence_params(self) -> DeltaRule:
        norm, spec = self._output_norms.get_weight(self._output_norm_name), self._spec
        assert norm is not None
        decay_rate, dt_bias = -self._weights["A_log"].flatten().exp(), self._weights["dt_bias"].contiguous()
        heads = len(self._head_span)
        return DeltaRule(decay_rate, dt_bias, norm, spec.norm.eps, heads, spec.key_dim, has_sigmoid_gate=True)
