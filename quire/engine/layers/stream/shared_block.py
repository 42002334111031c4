"""Attention and an MLP whose weights several layers share (Zamba 2: Glorioso et al., 2024): they read the stream and
the tokens' embeddings side by side, each use adds low-rank linears of its own, and what they give goes through another
linear to what the layer's state space reads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial, reduce

from torch import Tensor

from quire.engine.checkpoint.parts.states import PagedState
from quire.engine.layers.adapters import Adapters
from quire.engine.layers.attention import Attention, AttentionSpec
from quire.engine.layers.linear import JoinedLinear, Projection
from quire.engine.layers.norm import NormSpec, NormWeights
from quire.engine.layers.parameters import ParameterTable, parameters_of
from quire.engine.layers.part import BuildContext, PageTensor, Step, Sublayer, SublayerSpec, uneven
from quire.engine.layers.schemes import Scheme
from quire.engine.layers.shard import Cut
from quire.kernels.activation import Activation
from quire.kernels.backend import LinearContext, Operations
from quire.kernels.quantized import Given

BLOCK = "shared_transformer"
"""What a checkpoint calls it, behind the layer's name."""


@dataclass(frozen=True, slots=True)
class SharedBlockSpec(SublayerSpec):
    attention: AttentionSpec
    """Its input is twice as wide as the stream."""
    inner: int
    """Of the MLP,"""
    bias: bool
    """whose linears may have one,"""
    activation: Activation
    """and the function of its gates."""
    norm: NormSpec
    home: int
    """The layer that has the weights in a checkpoint."""
    use: int
    """Which of the uses of all blocks this is: its low-rank linears are called by it."""
    rank: int
    """Of these."""
    adapts_attention: bool
    """Queries, keys and values have some too, not only the MLP."""

    @property
    def state(self) -> PagedState:
        state = self.attention.state
        assert isinstance(state, PagedState)
        return state

    def part(self, making: BuildContext, layer: str) -> SharedBlock:
        return SharedBlock(self, making, layer)

    def indivisible(self, ranks: int) -> str | None:
        return uneven(self.inner, f"intermediate_size {self.inner}", ranks) or self.attention.indivisible(ranks)


class SharedBlock(Sublayer):
    def __init__(self, spec: SharedBlockSpec, making: BuildContext, layer: str) -> None:
        shard, hidden, inner = making.shard, making.hidden_size, spec.inner
        self._spec, self._making = spec, making
        self._home, self._own = f"model.layers.{spec.home}.{BLOCK}", f"{layer}.{BLOCK}"
        small = partial(JoinedLinear, making.scheme, bias=False)
        self._small = {
            name: (
                small(2 * hidden, {f"{self._home}.self_attn.linear_{name}_adapter_list.{spec.use}.0": spec.rank}),
                f"{self._home}.self_attn.linear_{name}_adapter_list.{spec.use}.1",
            )
            for name in ("qkv" if spec.adapts_attention else "")
        }
        self._attention = Attention(spec.attention, replace(making, linears=self._linear), self._home)
        mlp, made = f"{self._home}.feed_forward", partial(self._shared, making.scheme, adapters=making.adapters)
        gate, up, down = (f"{mlp}.{name}_proj" for name in ("gate", "up", "down"))
        outs = shard.outs(inner)
        self._gate, self._up = (made(hidden, {name: inner}, bias=spec.bias, cuts={name: outs}) for name in (gate, up))
        self._down = made(inner, {down: hidden}, bias=spec.bias, cuts={down: shard.ins(inner)})
        low = f"{mlp}.gate_up_proj_adapter_list.{spec.use}"
        self._low = small(hidden, {f"{low}.0": spec.rank})
        self._low_gate, self._low_up = (
            small(spec.rank, {name: inner}, cuts={name: outs}) for name in (f"{low}.1.gate", f"{low}.1.up")
        )
        self._linear_out = small(hidden, {f"{layer}.linear": hidden}, adapters=making.adapters)
        self._norm = f"{self._home}.input_layernorm"
        self._norms = NormWeights({self._norm: 2 * hidden}, making.dtype, spec.norm)

    def parameters(self) -> ParameterTable:
        mlp = (self._gate, self._up, self._down, self._low, self._low_gate, self._low_up)
        return parameters_of(self._norms, self._attention, *mlp, self._linear_out)

    def pages(self, num_blocks: int) -> tuple[PageTensor, ...]:
        return self._attention.pages(num_blocks)

    @property
    def page_formula(self) -> str:
        return self._attention.page_formula

    def forward(self, run: Operations, x: Tensor, residual: Tensor | None, step: Step) -> tuple[Tensor, Tensor]:
        """What it gives is not to be added to the stream: see StateSpaceSpec.aside."""
        residual = x if residual is None else run.add(x, residual)
        assert step.beside is not None
        both = self._norms.norm(run, self._norm, run.join(residual, step.beside))
        x, _ = self._attention.forward(run, both, residual, step)
        x = run.apply(self._linear_out.packed, self._mlp(run, x, step.context), step.context)
        return x, residual

    def _mlp(self, run: Operations, x: Tensor, context: LinearContext) -> Tensor:
        low = run.apply(self._low.packed, x, context)
        gate, up = (
            run.add(run.apply(own.packed, low, context), shared.apply(run, x, context))
            for own, shared in ((self._low_gate, self._gate), (self._low_up, self._up))
        )
        gate = run.activate(gate, self._spec.activation)
        return run.sum(self._down.apply(run, run.mul_columns(gate, up, 0), context), self._making.shard.group)

    def _linear(
        self,
        scheme: Scheme,
        in_features: int,
        parts: dict[str, int],
        *,
        bias: bool,
        adapters: Adapters | None,
        cuts: Mapping[str, Cut],
    ) -> Projection:
        """One of attention's, as BuildContext.linears has it."""
        small = {f"{self._home}.self_attn.{name}_proj": pair for name, pair in self._small.items()}
        made = partial(self._shared, scheme, in_features, bias=bias, adapters=adapters)
        if not small.keys() & parts.keys():
            return made(parts, cuts=cuts)
        pieces = []
        for name, outs in parts.items():
            low, up = small[name]
            high = JoinedLinear(scheme, self._spec.rank, {up: outs}, bias=False, cuts={up: cuts[name]})
            pieces.append(_Piece(made({name: outs}, cuts={name: cuts[name]}), low, high))
        return _SideBySide(pieces)

    def _shared(
        self,
        scheme: Scheme,
        in_features: int,
        parts: dict[str, int],
        *,
        bias: bool,
        adapters: Adapters | None,
        cuts: Mapping[str, Cut],
    ) -> Projection:
        """Of the weights that all uses have."""
        first, found = next(iter(parts)), self._making.shared
        if self._home != self._own:
            return found[first].used_as(tuple(name.replace(self._home, self._own) for name in parts))
        found[first] = JoinedLinear(scheme, in_features, parts, bias=bias, adapters=adapters, cuts=cuts)
        return found[first]


@dataclass(frozen=True, slots=True)
class _Piece:
    """A linear, to which two small ones in a row are added."""

    linear: Projection
    low: JoinedLinear
    high: JoinedLinear

    def apply(self, run: Operations, x: Given, context: LinearContext) -> Tensor:
        added = run.apply(self.high.packed, run.apply(self.low.packed, x, context), context)
        return run.add(added, self.linear.apply(run, x, context))


@dataclass(frozen=True, slots=True)
class _SideBySide:
    """Some of one input, what they give side by side."""

    pieces: list[_Piece]

    def parameters(self) -> ParameterTable:
        return {
            name: parameter
            for each in self.pieces
            for linear in (each.linear, each.low, each.high)
            for name, parameter in linear.parameters().items()
        }

    def apply(self, run: Operations, x: Given, context: LinearContext) -> Tensor:
        return reduce(run.join, (each.apply(run, x, context) for each in self.pieces))
