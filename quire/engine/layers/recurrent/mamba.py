"""A selective scan as Mamba has it (Gu and Dao, 2023) in attention's place: what a sequence keeps is of one size,
however long it is. What is computed kernels/recurrent/selective_scan.py says, and kernels/recurrent/short_conv.py what
stands before it."""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from quire.engine.architecture.recurrent import CONV_BIAS, CONV_WEIGHT, MambaLayerSpec
from quire.engine.layers.parameters import ParameterTable, make_row_slicer, merge_parameters
from quire.engine.layers.recurrent.mixer import MatrixStateMixer
from quire.engine.layers.shard import LinearSlice
from quire.engine.layers.sublayer import BuildContext, ForwardContext
from quire.kernels.backend import Operations
from quire.kernels.recurrent.selective_scan import SelectiveScan

_NORM_WEIGHTS = ("dt_layernorm.weight", "b_layernorm.weight", "c_layernorm.weight")


class MambaMixer(MatrixStateMixer):
    def __init__(self, spec: MambaLayerSpec, build_context: BuildContext, layer: str) -> None:
        super().__init__(spec, build_context, layer, "mamba")
        self._spec = spec
        shard = build_context.shard
        channels = spec.num_channels
        hidden = build_context.hidden_size
        (self._channels,), outs = self._channel_spans, shard.head_slice(self._head_span, spec.value_dim)
        ins = (
            LinearSlice(input_range=self._channels, adds_bias=shard.rank == 0)
            if shard.world_size > 1
            else LinearSlice()
        )
        self._x, self._z = (
            self._make_linear(hidden, {f"in_proj_{name}": (channels, outs)}, bias=spec.bias) for name in "xz"
        )
        self._dt_low_rank = self._make_linear(channels, {"x_proj_dt": (spec.dt_rank, ins)})
        self._bc = self._make_linear(channels, {f"x_proj_{name}": (spec.key_dim, ins) for name in "bc"})
        self._dt = self._make_linear(spec.dt_rank, {"dt_proj": (channels, outs)})
        self._out = self._make_linear(channels, {"out_proj": (hidden, ins)}, bias=spec.bias)
        self._inner_norm_shapes = {
            name: (size,) for name, size in zip(_NORM_WEIGHTS, (spec.dt_rank, spec.key_dim, spec.key_dim), strict=True)
        }
        if spec.inner_norm == "plain":
            self._weights |= {
                name: torch.ones(size, device=build_context.device) for name, size in self._inner_norm_shapes.items()
            }

    def parameters(self) -> ParameterTable:
        spec = self._spec
        table = merge_parameters(self._norms, self._x, self._z, self._dt_low_rank, self._bc, self._dt, self._out)
        shapes = {
            "A_log": (spec.num_channels, spec.key_dim),
            "D": (spec.num_channels,),
            "dt_proj.bias": (spec.num_channels,),
        }
        shapes |= {CONV_WEIGHT: (spec.num_channels, 1, spec.conv_width)} | (
            {CONV_BIAS: (spec.num_channels,)} if spec.conv_bias else {}
        )
        table |= self._make_parameters(shapes, make_row_slicer(self._channels))
        return table | self._make_parameters(self._inner_norm_shapes if spec.inner_norm == "learned" else {})

    def forward(
        self, ops: Operations, x: Tensor, residual: Tensor | None, step: ForwardContext
    ) -> tuple[Tensor, Tensor]:
        normed, residual = self._norms.norm_for_linears((self._x, self._z), ops, self._input_norm, x, residual)
        context, group = step.linear_context, self._build_context.shard.group
        x, z = (ops.apply_linear(each.packed_linear, normed, context) for each in (self._x, self._z))
        x = self._convolve(ops, x, step)
        dt_low_rank, bc = (
            ops.all_reduce(ops.apply_linear(each.packed_linear, x, context), group)
            for each in (self._dt_low_rank, self._bc)
        )
        if (norm := self._weights.get(_NORM_WEIGHTS[0])) is not None:
            dt_low_rank = ops.rms_norm(dt_low_rank, norm, self._spec.inner_eps)
        dt = ops.apply_linear(self._dt.packed_linear, dt_low_rank, context)
        return self._project_output(
            ops, self._run_recurrence(ops, ops.concat_columns(x, bc), z, dt, step), residual, step
        )

    @cached_property
    def recurrence_params(self) -> SelectiveScan:
        spec, weights = self._spec, self._weights
        decay_rate = -weights["A_log"].exp().view(len(self._head_span), spec.value_dim, spec.key_dim).transpose(1, 2)
        dt_bias, skip = (weights[name].contiguous() for name in ("dt_proj.bias", "D"))
        b_norm, c_norm = (weights.get(name) for name in _NORM_WEIGHTS[1:])
        return SelectiveScan(decay_rate.contiguous(), dt_bias, skip, b_norm, c_norm, spec.inner_eps)
