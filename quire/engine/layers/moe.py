"""A mixture of experts in an MLP's place (Shazeer et al., 2017): a router chooses some MLPs for each token."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain

import torch
from torch import Tensor

from quire.engine.layers.adapters import Adapters
from quire.engine.layers.linear import JoinedLinear
from quire.engine.layers.norm import NormSpec, NormWeights
from quire.engine.layers.parameters import ParameterTable, held, parameters_of, whole
from quire.engine.layers.part import BuildContext, Step, Sublayer, SublayerSpec, gated, uneven
from quire.engine.layers.schemes import Unquantized
from quire.engine.layers.shard import WHOLE, Cut, Shard
from quire.kernels.activation import Activation, Clamp
from quire.kernels.backend import Operations
from quire.kernels.quantized import Given, read_by
from quire.kernels.routing import Experts, Mixture, Routing

_SQUARED = Activation("relu2")


@dataclass(frozen=True, slots=True)
class SharedSpec:
    """An MLP beside the experts, which every token has; it has a gate where they have."""

    intermediate_size: int
    name: str
    """In a checkpoint, behind the layer's."""
    gate: str | None = None
    """A linear of one output, behind the layer's name: what the MLP gives is multiplied with its sigmoid."""
    bias: bool = False


@dataclass(frozen=True, slots=True)
class NarrowSpec:
    """Experts that read and give smaller vectors than the layer has: a linear makes those of what the layer reads, and
    another one makes the layer's of what the experts give together (Nemotron 3 Super, NVIDIA, 2026)."""

    size: int
    names: tuple[str, str]
    """Of the two linears in a checkpoint, behind the layer's."""
    bias: bool = False


@dataclass(frozen=True, slots=True)
class ExpertsSpec(SublayerSpec):
    """The shape of one layer's experts, and the switches by which families differ."""

    count: int
    routing: Routing
    intermediate_size: int
    """Of one expert."""
    norm: NormSpec
    shared: SharedSpec | None = None
    narrow: NarrowSpec | None = None
    """None: experts read what the router does, as wide as the layer."""
    input_norm: bool = True
    """Norm of what is read."""
    output_norm: bool = False
    """Norm of what the experts give together, before it joins the residual stream."""
    router_bias: bool = False
    float_router: bool = False
    """The router's weights are float32, whatever the model's type."""
    correction: str | None = None
    """The name, below the experts', of what is added to weights for the choice alone; None: nothing is."""
    correction_row: bool = False
    """It is stored as [1, experts]."""
    bias: bool = False
    """Of the experts' linears."""
    clamp: Clamp | None = None
    gated: bool = True
    """Without gates their function, and that of shared ones, is the square of ReLU."""
    shares_norm: bool = False
    """The norm of what is read is attention's."""
    parallel: bool = False
    """They read the residual stream as the part before has read it, and what they give is added to what that gives."""
    norms: tuple[str, str] = ("post_attention_layernorm", "post_feedforward_layernorm")
    """What the norms of what is read and of what is given are called, behind the layer's name."""
    gelu: bool = False
    """Gates are GELU in its tanh approximation, not SiLU."""
    router_scale: str | None = None
    """The name, below the experts', of what the router's input is multiplied with, and with hidden^-0.5, behind a norm
    of its own without weights; None: the router reads what the experts do."""
    factors: str | None = None
    """The name, below the experts', of factors of their weights; None: there are none."""
    whole: bool = False
    """Each is whole on one of the ranks that divide a layer, instead of divided among all of them."""
    name: str = "mlp"
    """In a checkpoint, behind the layer's ("": that itself); and below it the names of the router and, below each
    expert's, those of its linears."""
    router: str = "gate"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"

    def part(self, making: BuildContext, layer: str) -> Moe:
        return Moe(self, making, layer)

    def indivisible(self, ranks: int) -> str | None:
        if self.whole and ranks > self.count:
            return f"{ranks} ranks cannot have some of a layer's {self.count} experts each"
        widths = {} if self.whole else {"experts' width": self.intermediate_size}
        if self.shared is not None:
            widths["shared experts' width"] = self.shared.intermediate_size
        return next(filter(None, (uneven(size, f"{name} {size}", ranks) for name, size in widths.items())), None)


class Moe(Sublayer):
    """The sparse feed-forward part of a layer. Of its linears those of shared experts, and those around experts of
    smaller vectors, have room for adapters. Each rank has a part of every expert, or some of them whole, and the whole
    router."""

    def __init__(self, spec: ExpertsSpec, making: BuildContext, layer: str) -> None:
        backend, scheme = making.experts or (making.backend, making.scheme)
        self._spec, self._backend, self._shard = spec, backend, making.shard
        hidden, inner = making.hidden_size, spec.intermediate_size
        self._prefix, self._hidden = f"{layer}.{spec.name}" if spec.name else layer, hidden
        router, router_dtype = f"{self._prefix}.{spec.router}", torch.float32 if spec.float_router else making.dtype
        self._router = _whole(making, hidden, {router: spec.count}, router_dtype, bias=spec.router_bias, wide=True)
        each = [f"{self._prefix}.experts.{index}" for index in range(spec.count)]
        names = (spec.gate, spec.up, spec.down) if spec.gated else (spec.up, spec.down)
        self._narrow = None if spec.narrow is None else _Narrow(spec.narrow, making, layer)
        own = replace(making, scheme=scheme, hidden_size=hidden if spec.narrow is None else spec.narrow.size)
        shard = WHOLE if spec.whole else making.shard
        linears = [_mlp(own, inner, name, names, bias=spec.bias, adapters=None, shard=shard) for name in each]
        self._here = making.shard.span(spec.count) if spec.whole else range(spec.count)
        self._elsewhere = [linear for place, linear in enumerate(linears) if place not in self._here]
        here = [linears[place] for place in self._here]
        self._gate_up, self._down = [up for up, _ in here], [down for _, down in here]
        self._learned: dict[str | None, Tensor] = {}
        read, given = spec.norms
        self._input_norm = f"{layer}.{'input_layernorm' if spec.shares_norm else read}"
        self._output_norm = f"{layer}.{given}"
        norms = [self._input_norm] * spec.input_norm + [self._output_norm] * spec.output_norm
        self._norms = NormWeights(dict.fromkeys(norms, hidden), making.dtype, spec.norm)
        self._shared = None if spec.shared is None else _Shared(spec.shared, making, layer, gated=spec.gated)
        self._beside = tuple(each.reads for each in (self._shared, self._narrow) if each is not None)

    def parameters(self) -> ParameterTable:
        spec = self._spec
        linears = (self._router, *self._gate_up, *self._down)
        table = parameters_of(self._norms, self._shared, self._narrow, *linears)
        elsewhere = parameters_of(*chain.from_iterable(self._elsewhere))
        table |= {name: replace(each, put=_drop, cut=_nothing) for name, each in elsewhere.items()}
        learned: tuple[tuple[str | None, tuple[int, ...], Callable[[Tensor], Tensor]], ...] = (
            (spec.correction, (1,) * spec.correction_row + (spec.count,), lambda tensor: tensor.flatten().contiguous()),
            (spec.factors, (spec.count,), whole),
            (spec.router_scale, (self._hidden,), lambda tensor: tensor * self._hidden**-0.5),
        )
        for name, shape, make in learned:
            if name is not None:
                table[f"{self._prefix}.{name}"] = held(self._learned, name, shape, torch.float32, make)
        return table

    def complete(self) -> None:
        assert self._mixture is not None  # makes it

    def forward(self, run: Operations, x: Tensor, residual: Tensor | None, step: Step) -> tuple[Tensor, Tensor]:
        before = x
        parallel, reads = self._spec.parallel, (self._router, *self._beside)
        normed, residual = self._norms.read_by(reads, run, self._input_norm, x, residual, parallel=parallel)
        x = read_by(self._mixture, normed)
        scale = self._learned.get(self._spec.router_scale)
        routed = x if scale is None else run.rms_norm(residual, scale, self._spec.norm.eps)
        own = None if self._shared is None else self._shared.read(run, normed, step)  # before x goes
        narrow = self._narrow
        x = run.mix(self._mixture, x if narrow is None else narrow.read(run, normed, step), routed)
        x = x if narrow is None else narrow.given(run, x, step)
        x = x if self._shared is None or own is None else self._shared.added(run, *own, x)
        x = self._norms.norm(run, self._output_norm, run.sum(x, self._shard.group))
        return run.add(x, before) if self._spec.parallel else x, residual

    @cached_property
    def _mixture(self) -> Mixture:
        spec = self._spec
        experts = Experts(
            router=self._router.packed,
            gate_up=[each.packed for each in self._gate_up],
            down=[each.packed for each in self._down],
            routing=spec.routing,
            clamp=spec.clamp,
            activation=None if spec.gated else _SQUARED,
            correction=self._learned.get(spec.correction),
            factors=self._learned.get(spec.factors),
            gelu=spec.gelu,
            float_router=spec.float_router,
            first=self._here.start,
        )
        return self._backend.mixture(experts)


class _Shared:
    """What every token has beside its experts."""

    def __init__(self, spec: SharedSpec, making: BuildContext, layer: str, *, gated: bool) -> None:
        names = ("gate_proj", "up_proj", "down_proj") if gated else ("up_proj", "down_proj")
        where, size, self._gated = f"{layer}.{spec.name}", spec.intermediate_size, gated
        self._up, self._down = _mlp(
            making, size, where, names, bias=spec.bias, adapters=making.adapters, shard=making.shard
        )
        gate = None if spec.gate is None else {f"{layer}.{spec.gate}": 1}
        self._gate = None if gate is None else _whole(making, making.hidden_size, gate, making.dtype)

    def parameters(self) -> ParameterTable:
        return parameters_of(self._up, self._down, self._gate)

    @property
    def reads(self) -> JoinedLinear:
        """What reads x, beside the gate, which never has few bits."""
        return self._up

    def read(self, run: Operations, x: Given, step: Step) -> tuple[Tensor, Tensor | None]:
        """What they give for x [T, hidden], and their gate's numbers [T, 1], if there is one."""
        up = run.apply(self._up.packed, x, step.context)
        between = gated(run, up, self._down) if self._gated else run.activate(up, _SQUARED)
        own = run.apply(self._down.packed, between, step.context)
        return own, None if self._gate is None else run.apply(self._gate.packed, x, step.context)

    def added(self, run: Operations, own: Tensor, gate: Tensor | None, mixed: Tensor) -> Tensor:
        """That and what the experts have given, which it may overwrite."""
        return run.add(own, mixed) if gate is None else run.add_gated(own, gate, mixed)


class _Narrow:
    """What stands around experts of smaller vectors, whole on every rank: the second linear takes what this rank's
    experts give, so that its results are summed with those of the shared ones."""

    def __init__(self, spec: NarrowSpec, making: BuildContext, layer: str) -> None:
        (read, given), hidden, size = (f"{layer}.{name}" for name in spec.names), making.hidden_size, spec.size
        scheme, bias, adapters = making.scheme, spec.bias, making.adapters
        summed = {given: Cut(biased=making.shard.rank == 0)}
        self.reads = JoinedLinear(scheme, hidden, {read: size}, bias=bias, adapters=adapters)
        self._given = JoinedLinear(scheme, size, {given: hidden}, bias=bias, adapters=adapters, cuts=summed)

    def parameters(self) -> ParameterTable:
        return self.reads.parameters() | self._given.parameters()

    def read(self, run: Operations, x: Given, step: Step) -> Tensor:
        """What the experts read. x [T, hidden] stays."""
        return self.reads.apply(run, x, step.context)

    def given(self, run: Operations, x: Tensor, step: Step) -> Tensor:
        return self._given.apply(run, x, step.context)


def _whole(
    making: BuildContext,
    inner: int,
    outs: dict[str, int],
    dtype: torch.dtype,
    *,
    bias: bool = False,
    wide: bool = False,
) -> JoinedLinear:
    """A linear that each rank has whole and that never has few bits: choices would change."""
    return JoinedLinear(Unquantized(making.backend, dtype), inner, outs, bias=bias, wide=wide)


def _mlp(
    making: BuildContext,
    size: int,
    where: str,
    names: tuple[str, ...],
    *,
    bias: bool,
    adapters: Adapters | None,
    shard: Shard,
) -> tuple[JoinedLinear, JoinedLinear]:
    """This rank's part of an MLP so wide: what reads, a gate and up as one or up alone, and its down."""
    *reads, down = (f"{where}.{name}" for name in names)
    hidden = making.hidden_size
    outs, ins = dict.fromkeys(reads, shard.outs(size)), {down: shard.ins(size)}
    read = dict.fromkeys(reads, size)
    first = JoinedLinear(making.scheme, hidden, read, bias=bias, adapters=adapters, cuts=outs)
    return first, JoinedLinear(making.scheme, size, {down: hidden}, bias=bias, adapters=adapters, cuts=ins)


def _nothing(tensor: Tensor) -> Tensor:
    """Of another rank's expert: its bytes are not read."""
    return tensor.new_empty(0)


def _drop(tensor: Tensor) -> None:
    pass
