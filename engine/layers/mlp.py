"""The gated MLP (Shazeer, 2020), with the norms around it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from torch import Tensor

from quire.engine.layers.linear import JoinedLinear
from quire.engine.layers.norm import NormSpec, NormWeights
from quire.engine.layers.parameters import ParameterTable
from quire.engine.layers.part import Making, Part, PartSpec, Step
from quire.kernels.backend import Operations


@dataclass(frozen=True, slots=True)
class MlpSpec(PartSpec):
    intermediate_size: int
    norm: NormSpec
    bias: bool = False
    gelu: bool = False
    """The gate is GELU in its tanh approximation, not SiLU."""
    output_norm: bool = False
    """RMSNorm of what the MLP gives, before it joins the residual stream."""

    def part(self, making: Making, layer: str) -> Mlp:
        return Mlp(self, making, layer)

    def indivisible(self, ranks: int) -> str | None:
        if self.intermediate_size % ranks:
            return f"the model's intermediate_size {self.intermediate_size} cannot be divided among {ranks} ranks"
        return None


class Mlp(Part):
    """The dense feed-forward part of a layer."""

    def __init__(self, spec: MlpSpec, making: Making, layer: str) -> None:
        self._spec, self._shard = spec, making.shard
        hidden, inner, prefix = making.hidden_size, spec.intermediate_size, f"{layer}.mlp"
        gate_up, down = dict.fromkeys((f"{prefix}.gate_proj", f"{prefix}.up_proj"), inner), f"{prefix}.down_proj"
        outs, ins = dict.fromkeys(gate_up, making.shard.outs(inner)), {down: making.shard.ins(inner)}
        linear = partial(JoinedLinear, making.scheme, bias=spec.bias, adapters=making.adapters)
        self._gate_up = linear(hidden, gate_up, cuts=outs)
        self._down = linear(inner, {down: hidden}, cuts=ins)
        self._output_norm = f"{layer}.post_feedforward_layernorm"
        # In families with output norms, post_attention_layernorm is attention's output norm instead.
        name = "pre_feedforward_layernorm" if spec.output_norm else "post_attention_layernorm"
        self._input_norm = f"{layer}.{name}"
        norms = [self._input_norm, self._output_norm] if spec.output_norm else [self._input_norm]
        self._norms = NormWeights(dict.fromkeys(norms, hidden), making.dtype, spec.norm)

    def parameters(self) -> ParameterTable:
        return self._norms.parameters() | self._gate_up.parameters() | self._down.parameters()

    def forward(self, run: Operations, x: Tensor, residual: Tensor | None, step: Step) -> tuple[Tensor, Tensor]:
        context, gate_mul = step.context, run.gelu_mul if self._spec.gelu else run.silu_mul
        x, residual = self._norms.add(run, self._input_norm, x, residual)
        x = run.apply(self._down.packed, gate_mul(run.apply(self._gate_up.packed, x, context)), context)
        return self._norms.norm(run, self._output_norm, run.sum(x, self._shard.group)), residual
