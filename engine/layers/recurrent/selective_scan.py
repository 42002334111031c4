"""A selective scan as Mamba has it (Gu and Dao, 2023) in attention's place: what a sequence keeps is of one size,
however long it is. What is computed kernels/recurrent/selective_scan.py says, and kernels/recurrent/short_conv.py what
stands before it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Literal

import torch
from torch import Tensor

from quire.engine.checkpoint.parts.states import MatrixState
from quire.engine.layers.linear import JoinedLinear
from quire.engine.layers.norm import NormSpec, NormWeights
from quire.engine.layers.parameters import Parameter, ParameterTable
from quire.engine.layers.part import Making, PageTensor, Part, PartSpec, Step
from quire.engine.layers.shard import Cut
from quire.kernels.backend import Operations
from quire.kernels.recurrent.recurrence import Matrices
from quire.kernels.recurrent.selective_scan import SelectiveScan
from quire.kernels.recurrent.short_conv import Columns, ShortConv

_NORMS = ("dt_layernorm", "b_layernorm", "c_layernorm")


@dataclass(frozen=True, slots=True)
class SelectiveScanSpec(PartSpec):
    heads: int
    """So many times `value` channels,"""
    value: int
    """which are computed together."""
    key: int
    """Numbers of a channel's state, of b and of c."""
    rank: int
    """Numbers that a token's steps are projected from."""
    width: int
    """Tokens that a token sees through the convolution, itself included."""
    norm: NormSpec
    """Of what is read."""
    bias: bool = False
    """Of the first linear and of the last one."""
    conv_bias: bool = True
    inner_norm: Literal["learned", "plain"] | None = None
    """Norms of what steps are projected from, of b and of c: with weights, or without; None: there are none."""
    inner_eps: float = 1e-6
    """Of these."""

    @property
    def channels(self) -> int:
        return self.heads * self.value

    @property
    def outputs(self) -> Mapping[str, int]:
        """Of the linears that a checkpoint has joined, by what they are called here."""
        projected = {"x_proj_dt": self.rank, "x_proj_b": self.key, "x_proj_c": self.key}
        return {"in_proj_x": self.channels, "in_proj_z": self.channels} | projected

    @property
    def state(self) -> MatrixState:
        beside = self.channels + 2 * self.key
        return MatrixState(self.channels, self.width - 1, self.heads, self.key, self.value, beside)

    def part(self, making: Making, layer: str) -> SelectiveScanPart:
        return SelectiveScanPart(self, making, layer)

    def indivisible(self, ranks: int) -> str | None:
        if self.heads % ranks:
            channels = f"{self.channels} channels of selective scans, {self.value} of which are computed together,"
            return f"the model's {channels} cannot be divided among {ranks} ranks"
        return None


class SelectiveScanPart(Part):
    def __init__(self, spec: SelectiveScanSpec, making: Making, layer: str) -> None:
        shard, channels = making.shard, spec.channels
        self._spec, self._making, self._prefix = spec, making, f"{layer}.mamba"
        self._heads = shard.span(spec.heads)
        own = range(self._heads.start * spec.value, self._heads.stop * spec.value)
        self._own, outs = own, shard.heads(self._heads, spec.value)
        ins = Cut(ins=own, biased=shard.rank == 0) if shard.count > 1 else Cut()

        def linear(inner: int, sizes: Mapping[str, int], cut: Cut, *, bias: bool = False) -> JoinedLinear:
            parts = {f"{self._prefix}.{name}": size for name, size in sizes.items()}
            cuts = dict.fromkeys(parts, cut)
            return JoinedLinear(making.scheme, inner, parts, bias=bias, adapters=making.adapters, cuts=cuts)

        self._x, self._z = (
            linear(making.hidden_size, {f"in_proj_{name}": channels}, outs, bias=spec.bias) for name in "xz"
        )
        self._low = linear(channels, {"x_proj_dt": spec.rank}, ins)
        self._bc = linear(channels, {f"x_proj_{name}": spec.key for name in "bc"}, ins)
        self._steps = linear(spec.rank, {"dt_proj": channels}, outs)
        self._out = linear(channels, {"out_proj": making.hidden_size}, ins, bias=spec.bias)
        self._norm = f"{layer}.input_layernorm"
        self._norms = NormWeights({self._norm: making.hidden_size}, making.dtype, spec.norm)
        self._weights: dict[str, Tensor] = {}
        if spec.inner_norm == "plain":
            sizes = (spec.rank, spec.key, spec.key)
            ones = [torch.ones(size, device=making.device) for size in sizes]
            self._weights |= dict(zip(_NORMS, ones, strict=True))

    def parameters(self) -> ParameterTable:
        spec, table = self._spec, self._norms.parameters()
        for linear in (self._x, self._z, self._low, self._bc, self._steps, self._out):
            table |= linear.parameters()
        shapes = {"A_log": (spec.channels, spec.key), "D": (spec.channels,), "dt_proj.bias": (spec.channels,)}
        shapes |= {"conv1d.weight": (spec.channels, 1, spec.width)}
        shapes |= {"conv1d.bias": (spec.channels,)} if spec.conv_bias else {}
        channels = partial(torch.narrow, dim=0, start=self._own.start, length=len(self._own))
        for name, shape in shapes.items():
            put = partial(self._weights.__setitem__, name)
            table[f"{self._prefix}.{name}"] = Parameter(shape, torch.float32, put, channels)
        if spec.inner_norm == "learned":
            for name, size in zip(_NORMS, (spec.rank, spec.key, spec.key), strict=True):
                put = partial(self._weights.__setitem__, name)
                table[f"{self._prefix}.{name}.weight"] = Parameter((size,), torch.float32, put)
        return table

    def slots(self, count: int, drafts: int) -> tuple[PageTensor, ...]:
        """The convolution's last columns; the channels' numbers; what of guesses these may have to take in later."""
        spec, making, own = self._spec, self._making, len(self._own)
        wide = torch.float64 if making.dtype == torch.float64 else torch.float32
        return (
            PageTensor((count, spec.width - 1 + drafts, own), making.dtype),
            PageTensor((count, len(self._heads), spec.key, spec.value), wide),
            PageTensor((count, drafts, 2 * own + 2 * spec.key), making.dtype),
        )

    def forward(self, run: Operations, x: Tensor, residual: Tensor | None, step: Step) -> tuple[Tensor, Tensor]:
        x, residual = self._norms.add(run, self._norm, x, residual)
        recent, matrices, guesses = step.pages
        context, metadata, group = step.context, step.metadata, self._making.shard.group
        x, z = (run.apply(each.packed, x, context) for each in (self._x, self._z))
        x = run.short_conv(x, self._conv, Columns(None, 1, recent), metadata)
        low, bc = (run.sum(run.apply(each.packed, x, context), group) for each in (self._low, self._bc))
        if (norm := self._weights.get("dt_layernorm")) is not None:
            low = run.rms_norm(low, norm, self._spec.inner_eps)
        steps = run.apply(self._steps.packed, low, context)
        found = run.recur(run.join(x, bc), z, steps, self._rule, Matrices(matrices, guesses), metadata)
        if step.rows is not None:
            found, residual, context = found[step.rows], residual[step.rows], context.at(step.rows)
        return run.sum(run.apply(self._out.packed, found, context), group), residual

    @cached_property
    def _conv(self) -> ShortConv:
        """Once its weights are there."""
        weight = self._weights["conv1d.weight"][:, 0].t().contiguous()
        return ShortConv(weight, self._weights.get("conv1d.bias"), gated=False)

    @cached_property
    def _rule(self) -> SelectiveScan:
        """The same."""
        spec, weights = self._spec, self._weights
        rate = -weights["A_log"].exp().view(len(self._heads), spec.value, spec.key).transpose(1, 2)
        shift, skip = (weights[name].contiguous() for name in ("dt_proj.bias", "D"))
        write, read = (weights.get(name) for name in _NORMS[1:])
        return SelectiveScan(rate.contiguous(), shift, skip, write, read, spec.inner_eps)
