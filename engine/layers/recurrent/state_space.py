"""A selective state space as Mamba 2 has it (Dao and Gu, 2024) in attention's place, or beside it: what a sequence
keeps is of one size, however long it is. What is computed kernels/recurrent/state_space.py says, and
kernels/recurrent/short_conv.py what stands before it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from quire.engine.checkpoint.parts.states import MatrixState
from quire.engine.layers.linear import JoinedLinear
from quire.engine.layers.norm import NormSpec, NormWeights
from quire.engine.layers.parameters import Parameter, ParameterTable
from quire.engine.layers.part import Making, Normed, PageTensor, Part, PartSpec, Step, times
from quire.kernels.backend import Operations
from quire.kernels.recurrent.recurrence import Matrices
from quire.kernels.recurrent.short_conv import Columns, ShortConv
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
class StateSpaceSpec(PartSpec):
    groups: int
    heads: int
    """Of which as many read each group's b and c."""
    key: int
    """Numbers of b and of c,"""
    value: int
    """and of a head's x."""
    width: int
    """Tokens that a token sees through the convolution, itself included."""
    norm: NormSpec
    """Of what is read."""
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
    def channels(self) -> int:
        """Of the convolution: x, b and c."""
        return self.heads * self.value + 2 * self.groups * self.key

    @property
    def outputs(self) -> Mapping[str, int]:
        """Of the linears that a checkpoint has joined, by what they are called here."""
        values, keys = self.heads * self.value, self.groups * self.key
        sizes = {"z": values, "x": values, "b": keys, "c": keys, "dt": self.heads}
        return {f"in_proj_{name}": size for name, size in sizes.items()}

    @property
    def state(self) -> MatrixState:
        return MatrixState(self.channels, self.width - 1, self.heads, self.key, self.value, self.heads)

    def part(self, making: Making, layer: str) -> StateSpacePart:
        return StateSpacePart(self, making, layer)

    def indivisible(self, ranks: int) -> str | None:
        if self.groups % ranks:
            return f"the model's {self.groups} groups of a state space's heads cannot be divided among {ranks} ranks"
        return None


class StateSpacePart(Part):
    def __init__(self, spec: StateSpaceSpec, making: Making, layer: str) -> None:
        shard, hidden = making.shard, making.hidden_size
        layer = f"{layer}.{spec.within}" if spec.within else layer
        self._spec, self._making, self._prefix = spec, making, f"{layer}.mamba"
        self._groups, self._heads = shard.span(spec.groups), shard.span(spec.heads)
        values, keys = spec.heads * spec.value, spec.groups * spec.key
        kinds = {"z": (values, self._heads, spec.value), "x": (values, self._heads, spec.value)}
        kinds |= {"b": (keys, self._groups, spec.key), "c": (keys, self._groups, spec.key)}
        kinds |= {"dt": (spec.heads, self._heads, 1)}

        def reads(*names: str) -> JoinedLinear:
            own = {name: f"{self._prefix}.in_proj_{name}" for name in names}
            cuts = {own[name]: shard.heads(*kinds[name][1:]) for name in names}
            sizes = {own[name]: kinds[name][0] for name in names}
            return JoinedLinear(making.scheme, hidden, sizes, bias=spec.bias, adapters=making.adapters, cuts=cuts)

        self._z, self._xbc, self._dt = reads("z"), reads("x", "b", "c"), reads("dt")
        out, linear = f"{self._prefix}.out_proj", partial(JoinedLinear, making.scheme, adapters=making.adapters)
        self._out = linear(values, {out: hidden}, bias=spec.out_bias, cuts={out: shard.ins(values)})
        self._norm = f"{layer}.input_layernorm"
        self._norms = NormWeights({self._norm: hidden}, making.dtype, spec.norm)
        self._weights: dict[str, Tensor] = {}

    def parameters(self) -> ParameterTable:
        spec, table = self._spec, self._norms.parameters()
        for linear in (self._z, self._xbc, self._dt, self._out):
            table |= linear.parameters()
        heads = partial(torch.narrow, dim=0, start=self._heads.start, length=len(self._heads))
        for name in ("A_log", "dt_bias", "D"):
            table[f"{self._prefix}.{name}"] = self._kept(name, (spec.heads,), heads)
        if spec.result_norm is not None:
            own, size = self._heads, spec.value
            cut = partial(torch.narrow, dim=0, start=own.start * size, length=len(own) * size)
            table[f"{self._prefix}.norm.weight"] = self._kept("norm", (spec.heads * size,), cut)
        table[f"{self._prefix}.conv1d.weight"] = self._kept("conv", (spec.channels, 1, spec.width), self._own_channels)
        if spec.conv_bias:
            table[f"{self._prefix}.conv1d.bias"] = self._kept("conv_bias", (spec.channels,), self._own_channels)
        return table

    def _kept(self, name: str, shape: tuple[int, ...], cut: Callable[[Tensor], Tensor]) -> Parameter:
        return Parameter(shape, torch.float32, partial(self._weights.__setitem__, name), cut)

    def _own_channels(self, whole: Tensor) -> Tensor:
        """This rank's of the convolution's [channels, ...]."""
        spec, keys = self._spec, self._spec.groups * self._spec.key
        x, b, c = whole.split([spec.heads * spec.value, keys, keys])
        own, groups = self._heads, self._groups
        parts = [each[groups.start * spec.key : groups.stop * spec.key] for each in (b, c)]
        return torch.cat([x[own.start * spec.value : own.stop * spec.value], *parts])

    def normed(self) -> tuple[Normed, ...]:
        return (Normed(self._norm, self._spec.norm.offset, (self._z, self._xbc, self._dt)),)

    def slots(self, count: int, drafts: int) -> tuple[PageTensor, ...]:
        """The convolution's last columns; the matrices; and what of guesses these may have to take in later."""
        spec, making, heads = self._spec, self._making, len(self._heads)
        channels = heads * spec.value + 2 * len(self._groups) * spec.key
        wide = torch.float64 if making.dtype == torch.float64 else torch.float32
        return (
            PageTensor((count, spec.width - 1 + drafts, channels), making.dtype),
            PageTensor((count, heads, spec.key, spec.value), wide),
            PageTensor((count, drafts, channels + heads), making.dtype),
        )

    def forward(self, run: Operations, x: Tensor, residual: Tensor | None, step: Step) -> tuple[Tensor, Tensor]:
        attended, factors = x, self._spec.factors
        if self._spec.parallel:
            assert residual is not None
            x = self._norms.norm(run, self._norm, residual)
        elif self._spec.aside:
            assert residual is not None
            x = self._norms.norm(run, self._norm, run.add(residual, x))
        else:
            x, residual = self._norms.add(run, self._norm, x, residual)
        recent, matrices, guesses = step.pages
        context, metadata = step.context, step.metadata
        z, xbc, dt = (run.apply(each.packed, x, context) for each in (self._z, self._xbc, self._dt))
        xbc = run.short_conv(xbc, self._conv, Columns(None, 1, recent), metadata)
        z, dt = times(run, z, factors.z), times(run, dt, factors.dt)
        found = run.recur(xbc, z, dt, self._rule, Matrices(matrices, guesses), metadata)
        if step.rows is not None:
            found, residual, context = found[step.rows], residual[step.rows], context.at(step.rows)
            attended = attended[step.rows]
        x = times(run, run.sum(run.apply(self._out.packed, found, context), self._making.shard.group), factors.out)
        return run.add(x, attended) if self._spec.parallel else x, residual

    @cached_property
    def _conv(self) -> ShortConv:
        """Once its weights are there. Their arithmetic is float32, so factors of what is convolved are theirs."""
        spec, sizes = self._spec, [len(each) * size for each, size in self._convolved]
        factors = torch.cat([torch.full((size,), each) for size, each in zip(sizes, spec.factors[1:4], strict=True)])
        weight = self._weights["conv"][:, 0] * factors[:, None].to(self._weights["conv"].device)
        return ShortConv(weight.t().contiguous(), self._weights.get("conv_bias"), gated=False)

    @property
    def _convolved(self) -> tuple[tuple[range, int], ...]:
        """This rank's heads of x, and groups of b and c, with their sizes."""
        spec = self._spec
        return (self._heads, spec.value), (self._groups, spec.key), (self._groups, spec.key)

    @cached_property
    def _rule(self) -> StateSpace:
        """The same."""
        spec, weights = self._spec, self._weights
        shift, skip = (weights[name].contiguous() for name in ("dt_bias", "D"))
        rate, norm, before = -weights["A_log"].exp(), weights.get("norm"), spec.result_norm == "before"
        sizes = (len(self._groups), spec.key, spec.value)
        return StateSpace(rate, shift, skip, norm, spec.result_eps, *sizes, limits=spec.limits, norm_first=before)
