"""The feed-forward part of a layer: a gated MLP (Shazeer, 2020), or one without a gate, with the norms around it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, partial
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.engine.layers.linear import JoinedLinear
from quire.engine.layers.norm import NormSpec, NormWeights
from quire.engine.layers.parameters import ParameterTable, held, parameters_of, whole
from quire.engine.layers.part import BuildContext, Normed, Step, Sublayer, SublayerSpec, gated, times, uneven
from quire.kernels.activation import Activation
from quire.kernels.backend import Operations
from quire.kernels.quantized import Given


@dataclass(frozen=True, slots=True)
class MlpSpec(SublayerSpec):
    intermediate_size: int
    norm: NormSpec
    bias: bool = False
    gated: bool = True
    activation: Literal["silu", "gelu", "gelu_tanh", "relu", "relu2", "xielu"] = "silu"
    """Gates are silu or gelu_tanh; without one it is any but silu."""
    input_norm: bool = True
    """Norm of what is read."""
    output_norm: bool = False
    """Norm of what the MLP gives, before it joins the residual stream."""
    parallel: bool = False
    """It reads the residual stream as attention has read it, before what attention gives is added."""
    shares_norm: bool = False
    """The norm of what is read is attention's."""
    factors: tuple[float, float] = (1.0, 1.0)
    """Of what the gate's function takes, and of what the MLP gives."""
    name: str = "mlp"
    """In a checkpoint, behind the layer's; and what is called so there too,"""
    output_name: str = "post_feedforward_layernorm"
    """the norm of what it gives."""

    def part(self, making: BuildContext, layer: str) -> Mlp:
        return Mlp(self, making, layer)

    def indivisible(self, ranks: int) -> str | None:
        return uneven(self.intermediate_size, f"intermediate_size {self.intermediate_size}", ranks)


class Mlp(Sublayer):
    """The dense feed-forward part of a layer."""

    def __init__(self, spec: MlpSpec, making: BuildContext, layer: str) -> None:
        self._spec, self._shard, self._dtype = spec, making.shard, making.dtype
        hidden, inner, self._prefix = making.hidden_size, spec.intermediate_size, (prefix := f"{layer}.{spec.name}")
        reads = (f"{prefix}.gate_proj", f"{prefix}.up_proj") if spec.gated else (f"{prefix}.up_proj",)
        up, down = dict.fromkeys(reads, inner), f"{prefix}.down_proj"
        outs, ins = dict.fromkeys(up, making.shard.outs(inner)), {down: making.shard.ins(inner)}
        linear = partial(JoinedLinear, making.scheme, bias=spec.bias, adapters=making.adapters)
        self._up = linear(hidden, up, cuts=outs)
        self._down = linear(inner, {down: hidden}, cuts=ins)
        self._output_norm = f"{layer}.{spec.output_name}"
        # In families with output norms, post_attention_layernorm is attention's output norm instead.
        name = "pre_feedforward_layernorm" if spec.output_norm else "post_attention_layernorm"
        self._input_norm = f"{layer}.{'input_layernorm' if spec.shares_norm else name}"
        norms = [self._input_norm] if spec.input_norm else []
        norms += [self._output_norm] if spec.output_norm else []
        self._norms = NormWeights(dict.fromkeys(norms, hidden), making.dtype, spec.norm)
        self._learned: dict[str, Tensor] = {}

    def parameters(self) -> ParameterTable:
        table = parameters_of(self._norms, self._up, self._down)
        if self._spec.activation == "xielu":  # factors are stored as what softplus makes positive
            for name, shape, make in (
                ("alpha_p", (1,), F.softplus),
                ("alpha_n", (1,), F.softplus),
                ("beta", (), whole),
            ):
                table[f"{self._prefix}.act_fn.{name}"] = held(self._learned, name, shape, torch.float32, make)
        return table

    def normed(self) -> tuple[Normed, ...]:
        own = Normed(self._input_norm, self._spec.norm.offset, (self._up,))
        return (own,) if self._spec.input_norm else ()

    @cached_property
    def _activation(self) -> Activation:
        kind, learned = self._spec.activation, {name: each.item() for name, each in self._learned.items()}
        assert kind != "silu"
        if kind != "xielu":
            return Activation(kind)
        slope = learned["beta"]
        return Activation(kind, learned["alpha_p"], learned["alpha_n"] + slope, slope)

    def forward(self, run: Operations, x: Tensor, residual: Tensor | None, step: Step) -> tuple[Tensor, Tensor]:
        attended = x
        parallel = self._spec.parallel
        normed, residual = self._norms.read_by((self._up,), run, self._input_norm, x, residual, parallel=parallel)
        between = self._between(run, run.apply(self._up.packed, normed, step.context))
        x = run.sum(run.apply(self._down.packed, between, step.context), self._shard.group)
        inner, outer = self._spec.factors
        x = self._norms.norm(run, self._output_norm, times(run, x, outer / inner))
        return run.add(x, attended) if self._spec.parallel else x, residual

    def _between(self, run: Operations, x: Tensor) -> Given:
        if not self._spec.gated:
            return run.activate(x, self._activation)
        x = times(run, x, self._spec.factors[0])  # what the gate is multiplied with too: see the end
        return gated(run, x, self._down, gelu=self._spec.activation == "gelu_tanh")
