"""Mamba 2 (Dao and Gu, 2024)."""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from quire.engine.architecture.recurrent import CONV_BIAS, CONV_WEIGHT, Mamba2LayerSpec
from quire.engine.layers.parameters import ParameterTable, make_row_slicer, merge_parameters
from quire.engine.layers.recurrent.mixer import MatrixStateMixer
from quire.engine.layers.sublayer import BuildContext, ForwardContext, SmoothableNorm, scale_tensor
from quire.kernels.backend import Operations
from quire.kernels.recurrent.short_conv import ShortConv
from quire.kernels.recurrent.state_space import StateSpace


class Mamba2Mixer(MatrixStateMixer):
    def __init__(self, spec: Mamba2LayerSpec, build_context: BuildContext, layer: str) -> None:
        super().__init__(spec, build_context, layer, "mamba", spec.parent_module or None)
        self._spec = spec
        shard = build_context.shard
        self._group_span = shard.rank_span(spec.num_groups)
        value = shard.head_slice(self._head_span, spec.value_dim)
        key = shard.head_slice(self._group_span, spec.key_dim)
        projections = {"z": value, "x": value, "b": key, "c": key, "dt": shard.head_slice(self._head_span, 1)}
        self._z, self._xbc, self._dt = (
            self._make_linear({f"in_proj_{name}": projections[name] for name in names})
            for names in (("z",), ("x", "b", "c"), ("dt",))
        )
        self._out = self._make_linear({"out_proj": shard.input_slice(spec.num_heads * spec.value_dim)})

    def parameters(self) -> ParameterTable:
        values, *_ = self._channel_spans
        table = merge_parameters(self._norms, self._z, self._xbc, self._dt, self._out)
        table |= self._make_parameters(("A_log", "dt_bias", "D"), make_row_slicer(self._head_span))
        table |= self._make_parameters(["norm.weight"], make_row_slicer(values))
        return table | self._make_parameters((CONV_WEIGHT, CONV_BIAS), self._slice_channels)

    def smoothable_norms(self) -> tuple[SmoothableNorm, ...]:
        return (SmoothableNorm(self._input_norm, self._spec.norm.weight_offset, (self._z, self._xbc, self._dt)),)

    def forward(
        self, ops: Operations, x: Tensor, residual: Tensor | None, step: ForwardContext
    ) -> tuple[Tensor, Tensor]:
        attended = x
        multipliers = self._spec.multipliers
        input_linears = (self._z, self._xbc, self._dt)
        if self._spec.joins_input_only:
            assert residual is not None
            normed, _ = self._norms.norm_for_linears(
                input_linears, ops, self._input_norm, ops.add_residual(residual, x), None
            )
        else:
            parallel = self._spec.parallel
            normed, residual = self._norms.norm_for_linears(
                input_linears, ops, self._input_norm, x, residual, parallel=parallel
            )
        z, xbc, dt = (ops.apply_linear(each.packed_linear, normed, step.linear_context) for each in input_linears)
        xbc = self._convolve(ops, xbc, step)
        z, dt = scale_tensor(ops, z, multipliers.z), scale_tensor(ops, dt, multipliers.dt)
        x, residual = self._project_output(ops, self._run_recurrence(ops, xbc, z, dt, step), residual, step)
        attended = attended if step.selected_rows is None else attended[step.selected_rows]
        x = scale_tensor(ops, x, multipliers.out)
        return ops.add_residual(x, attended) if self._spec.parallel else x, residual

    @cached_property
    def conv_params(self) -> ShortConv:
        """Multiplies channel multipliers into the weight, because the convolution is float32."""
        span_multipliers = zip(self._channel_spans, self._spec.multipliers[1:4], strict=True)
        channel_multipliers = torch.cat([torch.full((len(span),), multiplier) for span, multiplier in span_multipliers])
        weight = self._weights[CONV_WEIGHT][:, 0] * channel_multipliers[:, None].to(self._weights[CONV_WEIGHT].device)
        return ShortConv(weight.t().contiguous(), self._weights.get(CONV_BIAS), is_gated=False)

    @cached_property
    def recurrence_params(self) -> StateSpace:
        spec, weights = self._spec, self._weights
        dt_bias, skip = (weights[name].contiguous() for name in ("dt_bias", "D"))
        decay_rate = -weights["A_log"].exp()
        norm = weights.get("norm.weight")
        norm_first = spec.result_norm == "before"
        sizes = (len(self._group_span), spec.key_dim, spec.value_dim)
        return StateSpace(
            decay_rate,
            dt_bias,
            skip,
            norm,
            spec.result_eps,
            *sizes,
            dt_limits=spec.dt_limits,
            norm_before_gate=norm_first,
        )
