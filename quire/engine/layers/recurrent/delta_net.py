"""Gated delta net (Yang et al., 2024; Qwen3-Next)."""

from __future__ import annotations

from functools import cached_property

from torch import Tensor

from quire.engine.architecture.norm import NormSpec
from quire.engine.architecture.recurrent import CONV_WEIGHT, DeltaNetSpec
from quire.engine.layers.parameters import ParameterTable, make_row_slicer, merge_parameters
from quire.engine.layers.recurrent.mixer import MatrixStateMixer
from quire.engine.layers.sublayer import BuildContext, ForwardContext, SmoothableNorm
from quire.kernels.backend import Operations
from quire.kernels.recurrent.delta_rule import DeltaRule


class DeltaNet(MatrixStateMixer):
    def __init__(self, spec: DeltaNetSpec, build_context: BuildContext, layer: str) -> None:
        super().__init__(spec, build_context, layer, "linear_attn")
        shard = build_context.shard
        self._spec, self._key_head_span = spec, shard.rank_span(spec.num_key_heads)
        key = shard.head_slice(self._key_head_span, spec.key_dim)
        value = shard.head_slice(self._head_span, spec.value_dim)
        head_gate = shard.head_slice(self._head_span, 1)
        projections = {"q": key, "k": key, "v": value, "z": value, "b": head_gate, "a": head_gate}
        self._qkv, self._z, self._ba = (
            self._make_linear({f"in_proj_{name}": projections[name] for name in names}) for names in ("qkv", "z", "ba")
        )
        self._out = self._make_linear({"out_proj": shard.input_slice(spec.num_heads * spec.value_dim)})
        self._output_norm_name = f"{self._prefix}.norm"
        self._output_norms = self._shapes.make_norms([self._output_norm_name], NormSpec(spec.norm.eps))

    def parameters(self) -> ParameterTable:
        table = merge_parameters(self._norms, self._output_norms, self._qkv, self._z, self._ba, self._out)
        table |= self._make_parameters(("A_log", "dt_bias"), make_row_slicer(self._head_span))
        return table | self._make_parameters([CONV_WEIGHT], self._slice_channels)

    def smoothable_norms(self) -> tuple[SmoothableNorm, ...]:
        return (SmoothableNorm(self._input_norm, self._spec.norm.weight_offset, (self._qkv, self._z, self._ba)),)

    def forward(
        self, ops: Operations, x: Tensor, residual: Tensor | None, step: ForwardContext
    ) -> tuple[Tensor, Tensor]:
        input_linears = (self._qkv, self._z, self._ba)
        normed, residual = self._norms.norm_for_linears(input_linears, ops, self._input_norm, x, residual)
        qkv, z, ba = (ops.apply_linear(each.packed_linear, normed, step.linear_context) for each in input_linears)
        return self._project_output(
            ops, self._run_recurrence(ops, self._convolve(ops, qkv, step), z, ba, step), residual, step
        )

    @cached_property
    def recurrence_params(self) -> DeltaRule:
        norm, spec = self._output_norms.get_weight(self._output_norm_name), self._spec
        assert norm is not None
        decay_rate, dt_bias = -self._weights["A_log"].exp(), self._weights["dt_bias"].contiguous()
        return DeltaRule(decay_rate, dt_bias, norm, spec.norm.eps, len(self._key_head_span), spec.key_dim)
