"""A mixture of experts in an MLP's place (Shazeer et al., 2017): a router chooses some gated MLPs for each token."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, partial

from torch import Tensor

from quire.engine.layers.linear import JoinedLinear
from quire.engine.layers.norm import NormSpec, NormWeights
from quire.engine.layers.parameters import ParameterTable
from quire.engine.layers.part import Making, Part, PartSpec, Step
from quire.engine.layers.schemes import Unquantized
from quire.kernels.backend import Clamp, Experts, Linear, Operations


@dataclass(frozen=True, slots=True)
class ExpertsSpec(PartSpec):
    """The shape of one layer's experts, and the switches by which families differ."""

    count: int
    per_token: int
    """How many the router chooses."""
    intermediate_size: int
    """Of one expert."""
    normalized: bool
    """The shares of the chosen experts sum to 1; else those of all experts do."""
    norm: NormSpec
    router_bias: bool = False
    bias: bool = False
    """Of the experts' linears."""
    clamp: Clamp | None = None
    name: str = "mlp"
    """In a checkpoint, behind the layer's; and below it the names of the router and, below each
    expert's, those of its linears."""
    router: str = "gate"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"

    def part(self, making: Making, layer: str) -> Moe:
        return Moe(self, making, layer)

    def indivisible(self, ranks: int) -> str | None:
        return "mixtures of experts are not divided among ranks yet"


class Moe(Part):
    """The sparse feed-forward part of a layer. It has no room for adapters."""

    def __init__(self, spec: ExpertsSpec, making: Making, layer: str) -> None:
        self._spec, self._backend = spec, making.backend
        prefix, hidden, inner = f"{layer}.{spec.name}", making.hidden_size, spec.intermediate_size
        router = {f"{prefix}.{spec.router}": spec.count}
        whole = Unquantized(making.backend, making.dtype)  # no router has few bits: its choices would change
        self._router = JoinedLinear(whole, hidden, router, bias=spec.router_bias, wide=True)
        each = [f"{prefix}.experts.{index}" for index in range(spec.count)]
        linear = partial(JoinedLinear, making.scheme, bias=spec.bias)
        self._gate_up = [linear(hidden, {f"{name}.{spec.gate}": inner, f"{name}.{spec.up}": inner}) for name in each]
        self._down = [linear(inner, {f"{name}.{spec.down}": hidden}) for name in each]
        self._input_norm = f"{layer}.post_attention_layernorm"
        self._norms = NormWeights({self._input_norm: hidden}, making.dtype, spec.norm)

    def parameters(self) -> ParameterTable:
        table = self._norms.parameters()
        for linear in (self._router, *self._gate_up, *self._down):
            table |= linear.parameters()
        return table

    def forward(self, run: Operations, x: Tensor, residual: Tensor | None, step: Step) -> tuple[Tensor, Tensor]:
        x, residual = self._norms.add(run, self._input_norm, x, residual)
        return run.apply(self._mixture, x, step.context), residual

    @cached_property
    def _mixture(self) -> Linear:
        spec = self._spec
        experts = Experts(
            router=self._router.packed,
            gate_up=[each.packed for each in self._gate_up],
            down=[each.packed for each in self._down],
            per_token=spec.per_token,
            normalized=spec.normalized,
            clamp=spec.clamp,
        )
        return self._backend.mixture(experts)
