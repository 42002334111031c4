"""A selective scan as Mamba has it (Gu and Dao, 2023) in attention's place: what a sequence keeps is of one size,
however long it is. What is computed kernels/recurrent/selective_scan.py says, and kernels/recurrent/short_conv.py what
stands before it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from quire.engine.layers.parameters import ParameterTable, parameters_of, rows_of
from quire.engine.layers.part import BuildContext, Step, uneven
from quire.engine.layers.recurrent.part import CONV, CONV_BIAS, MatrixPart, MatrixSpec
from quire.engine.layers.shard import Cut
from quire.kernels.backend import Operations
from quire.kernels.recurrent.selective_scan import SelectiveScan

_NORMS = ("dt_layernorm.weight", "b_layernorm.weight", "c_layernorm.weight")


@dataclass(frozen=True, slots=True)
class SelectiveScanSpec(MatrixSpec):
    """Its heads are `value` channels each, which are computed together; `key`: numbers of a channel's state, of b and
    of c."""

    rank: int
    """Numbers that a token's steps are projected from."""
    bias: bool = False
    """Of the first linear and of the last one."""
    conv_bias: bool = True
    inner_norm: Literal["learned", "plain"] | None = None
    """Norms of what steps are projected from, of b and of c: with weights, or without; None: there are none."""
    inner_eps: float = 1e-6
    """Of these."""

    @property
    def convolved(self) -> tuple[tuple[int, int], ...]:
        return ((self.heads, self.value),)

    def beside(self, heads: int) -> int:
        return heads * self.value + 2 * self.key

    @property
    def outputs(self) -> Mapping[str, int]:
        """Of the linears that a checkpoint has joined, by what they are called here."""
        projected = {"x_proj_dt": self.rank, "x_proj_b": self.key, "x_proj_c": self.key}
        return {"in_proj_x": self.channels, "in_proj_z": self.channels} | projected

    def part(self, making: BuildContext, layer: str) -> SelectiveScanPart:
        return SelectiveScanPart(self, making, layer)

    def indivisible(self, ranks: int) -> str | None:
        channels = f"{self.channels} channels of selective scans, {self.value} of which are computed together,"
        return uneven(self.heads, channels, ranks)


class SelectiveScanPart(MatrixPart):
    def __init__(self, spec: SelectiveScanSpec, making: BuildContext, layer: str) -> None:
        super().__init__(spec, making, layer, "mamba")
        self._spec, shard, channels, hidden = spec, making.shard, spec.channels, making.hidden_size
        (self._own,), outs = self._spans, shard.heads(self._heads, spec.value)
        ins = Cut(ins=self._own, biased=shard.rank == 0) if shard.count > 1 else Cut()
        self._x, self._z = (
            self._linear(hidden, {f"in_proj_{name}": (channels, outs)}, bias=spec.bias) for name in "xz"
        )
        self._low = self._linear(channels, {"x_proj_dt": (spec.rank, ins)})
        self._bc = self._linear(channels, {f"x_proj_{name}": (spec.key, ins) for name in "bc"})
        self._steps = self._linear(spec.rank, {"dt_proj": (channels, outs)})
        self._out = self._linear(channels, {"out_proj": (hidden, ins)}, bias=spec.bias)
        self._inner = {name: (size,) for name, size in zip(_NORMS, (spec.rank, spec.key, spec.key), strict=True)}
        if spec.inner_norm == "plain":
            self._weights |= {name: torch.ones(size, device=making.device) for name, size in self._inner.items()}

    def parameters(self) -> ParameterTable:
        spec = self._spec
        table = parameters_of(self._norms, self._x, self._z, self._low, self._bc, self._steps, self._out)
        shapes = {"A_log": (spec.channels, spec.key), "D": (spec.channels,), "dt_proj.bias": (spec.channels,)}
        shapes |= {CONV: (spec.channels, 1, spec.width)} | ({CONV_BIAS: (spec.channels,)} if spec.conv_bias else {})
        table |= self._kept(shapes, rows_of(self._own))
        return table | self._kept(self._inner if spec.inner_norm == "learned" else {})

    def forward(self, run: Operations, x: Tensor, residual: Tensor | None, step: Step) -> tuple[Tensor, Tensor]:
        normed, residual = self._norms.read_by((self._x, self._z), run, self._norm, x, residual)
        context, group = step.context, self._making.shard.group
        x, z = (run.apply(each.packed, normed, context) for each in (self._x, self._z))
        x = self._convolve(run, x, step)
        low, bc = (run.sum(run.apply(each.packed, x, context), group) for each in (self._low, self._bc))
        if (norm := self._weights.get(_NORMS[0])) is not None:
            low = run.rms_norm(low, norm, self._spec.inner_eps)
        steps = run.apply(self._steps.packed, low, context)
        return self._given(run, self._recur(run, run.join(x, bc), z, steps, step), residual, step)

    @cached_property
    def rule(self) -> SelectiveScan:
        spec, weights = self._spec, self._weights
        rate = -weights["A_log"].exp().view(len(self._heads), spec.value, spec.key).transpose(1, 2)
        shift, skip = (weights[name].contiguous() for name in ("dt_proj.bias", "D"))
        write, read = (weights.get(name) for name in _NORMS[1:])
        return SelectiveScan(rate.contiguous(), shift, skip, write, read, spec.inner_eps)
