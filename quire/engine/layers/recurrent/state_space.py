"""A selective state space as Mamba 2 has it (Dao and Gu, 2024) in attention's place, or beside it: what a sequence
keeps is of one size, however long it is. What is computed kernels/recurrent/state_space.py says, and
kernels/recurrent/short_conv.py what stands before it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from quire.engine.layers.parameters import ParameterTable, parameters_of, rows_of
from quire.engine.layers.part import BuildContext, Normed, Step, times, uneven
from quire.engine.layers.recurrent.part import CONV, CONV_BIAS, MatrixPart, MatrixSpec
from quire.kernels.backend import Operations
from quire.kernels.recurrent.short_conv import ShortConv
from quire.kernels.recurrent.state_space import StateSpace


class Factors(NamedTuple):
    """What numbers are multiplied with: those that are projected, by their kinds, and what is projected at the end."""

    z: float = 1.0
    x: float = 1.0
    b: float = 1.0
    c: float = 1.0
    dt: float = 1.0
    out: float = 1.0


_ONES = Factors()


@dataclass(frozen=True, slots=True)
class StateSpaceSpec(MatrixSpec):
    """`key`: numbers of b and of c; `value`: of a head's x."""

    groups: int
    """Each group's b and c are read by as many heads."""
    result_eps: float
    """Of the norm of results."""
    bias: bool = False
    """Of the first linear,"""
    out_bias: bool = False
    """and of the last one."""
    conv_bias: bool = True
    result_norm: Literal["behind", "before"] | None = "behind"
    """A group's norm stands behind the gate, or before it; None: there is none."""
    limits: tuple[float, float] = (0.0, float("inf"))
    """Of steps."""
    factors: Factors = _ONES
    parallel: bool = False
    """It reads the residual stream as attention has read it, by the same norm, before what attention gives is added."""
    aside: bool = False
    """What the part before it gives is added to what it reads alone, not to the stream."""
    within: str = ""
    """In a checkpoint, behind the layer's name and before the part's."""

    @property
    def convolved(self) -> tuple[tuple[int, int], ...]:
        """x, b and c."""
        return (self.heads, self.value), (self.groups, self.key), (self.groups, self.key)

    def beside(self, heads: int) -> int:
        return heads

    @property
    def outputs(self) -> Mapping[str, int]:
        """Of the linears that a checkpoint has joined, by what they are called here."""
        values, keys = self.heads * self.value, self.groups * self.key
        sizes = {"z": values, "x": values, "b": keys, "c": keys, "dt": self.heads}
        return {f"in_proj_{name}": size for name, size in sizes.items()}

    def part(self, making: BuildContext, layer: str) -> StateSpacePart:
        return StateSpacePart(self, making, layer)

    def indivisible(self, ranks: int) -> str | None:
        return uneven(self.groups, f"{self.groups} groups of a state space's heads", ranks)


class StateSpacePart(MatrixPart):
    def __init__(self, spec: StateSpaceSpec, making: BuildContext, layer: str) -> None:
        super().__init__(spec, making, f"{layer}.{spec.within}" if spec.within else layer, "mamba")
        self._spec, shard, hidden = spec, making.shard, making.hidden_size
        self._groups, values = shard.span(spec.groups), spec.heads * spec.value
        value = (values, shard.heads(self._heads, spec.value))
        key = (spec.groups * spec.key, shard.heads(self._groups, spec.key))
        reads = {"z": value, "x": value, "b": key, "c": key, "dt": (spec.heads, shard.heads(self._heads, 1))}
        self._z, self._xbc, self._dt = (
            self._linear(hidden, {f"in_proj_{name}": reads[name] for name in names}, bias=spec.bias)
            for names in (("z",), ("x", "b", "c"), ("dt",))
        )
        self._out = self._linear(values, {"out_proj": (hidden, shard.ins(values))}, bias=spec.out_bias)

    def parameters(self) -> ParameterTable:
        spec, (values, *_) = self._spec, self._spans
        table = parameters_of(self._norms, self._z, self._xbc, self._dt, self._out)
        table |= self._kept(dict.fromkeys(("A_log", "dt_bias", "D"), (spec.heads,)), rows_of(self._heads))
        if spec.result_norm is not None:
            table |= self._kept({"norm.weight": (spec.heads * spec.value,)}, rows_of(values))
        shapes = {CONV: (spec.channels, 1, spec.width)} | ({CONV_BIAS: (spec.channels,)} if spec.conv_bias else {})
        return table | self._kept(shapes, self._own_channels)

    def normed(self) -> tuple[Normed, ...]:
        return (Normed(self._norm, self._spec.norm.offset, (self._z, self._xbc, self._dt)),)

    def forward(self, run: Operations, x: Tensor, residual: Tensor | None, step: Step) -> tuple[Tensor, Tensor]:
        attended, factors, reads = x, self._spec.factors, (self._z, self._xbc, self._dt)
        if self._spec.aside:
            assert residual is not None
            normed, _ = self._norms.read_by(reads, run, self._norm, run.add(residual, x), None)
        else:
            parallel = self._spec.parallel
            normed, residual = self._norms.read_by(reads, run, self._norm, x, residual, parallel=parallel)
        z, xbc, dt = (run.apply(each.packed, normed, step.context) for each in reads)
        xbc = self._convolve(run, xbc, step)
        z, dt = times(run, z, factors.z), times(run, dt, factors.dt)
        x, residual = self._given(run, self._recur(run, xbc, z, dt, step), residual, step)
        attended = attended if step.rows is None else attended[step.rows]
        x = times(run, x, factors.out)
        return run.add(x, attended) if self._spec.parallel else x, residual

    @cached_property
    def conv(self) -> ShortConv:
        """Once its weights are there. Their arithmetic is float32, so factors of what is convolved are theirs."""
        own = zip(self._spans, self._spec.factors[1:4], strict=True)
        factors = torch.cat([torch.full((len(span),), factor) for span, factor in own])
        weight = self._weights[CONV][:, 0] * factors[:, None].to(self._weights[CONV].device)
        return ShortConv(weight.t().contiguous(), self._weights.get(CONV_BIAS), gated=False)

    @cached_property
    def rule(self) -> StateSpace:
        spec, weights = self._spec, self._weights
        shift, skip = (weights[name].contiguous() for name in ("dt_bias", "D"))
        rate, norm, before = -weights["A_log"].exp(), weights.get("norm.weight"), spec.result_norm == "before"
        sizes = (len(self._groups), spec.key, spec.value)
        return StateSpace(rate, shift, skip, norm, spec.result_eps, *sizes, limits=spec.limits, norm_first=before)
