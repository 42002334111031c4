"""Mamba (Gu and Dao, 2023)."""

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
        (self._channels,), outs = self._channel_spans, shard.head_slice(self._head_span, spec.value_dim)
        ins = (
            LinearSlice(input_range=self._channels, adds_bias=shard.rank == 0)
            if shard.world_size > 1
            else LinearSlice()
        )
        self._x, self._z = (self._make_linear({f"in_proj_{name}": outs}) for name in "xz")
        self._dt_low_rank = self._make_linear({"x_proj_dt": ins})
        self._bc = self._make_linear({f"x_proj_{name}": ins for name in "bc"})
        self._dt = self._make_linear({"dt_proj": outs}, takes_bias=False)
        self._out = self._make_linear({"out_proj": ins})
        if spec.inner_norm == "plain":
            sizes = zip(_NORM_WEIGHTS, (spec.dt_rank, spec.key_dim, spec.key_dim), strict=True)
            self._weights |= {name: torch.ones(size, device=build_context.device) for name, size in sizes}

    def parameters(self) -> ParameterTable:
        table = merge_parameters(self._norms, self._x, self._z, self._dt_low_rank, self._bc, self._dt, self._out)
        own = ("A_log", "D", "dt_proj.bias", CONV_WEIGHT, CONV_BIAS)
        table |= self._make_parameters(own, make_row_slicer(self._channels))
        return table | self._make_parameters(_NORM_WEIGHTS)

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
