"""The gated MLP (Shazeer, 2020), with the norms around it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from quire.engine.layers.adapters import Adapters
from quire.engine.layers.linear import JoinedLinear
from quire.engine.layers.norm import NormWeights
from quire.engine.layers.parameters import ParameterTable
from quire.engine.layers.schemes import Scheme
from quire.engine.layers.shard import WHOLE, Shard
from quire.kernels.backend import Backend, LinearContext
from quire.kernels.layers import DenseMlp


@dataclass(frozen=True, slots=True)
class MlpSpec:
    """The shape of one layer's MLP, and the switches by which families differ."""

    hidden_size: int
    intermediate_size: int
    norm_eps: float
    norm_offset: float
    """Added to the weights of all norms."""
    bias: bool
    gelu: bool
    """The gate is GELU in its tanh approximation, not SiLU."""
    output_norm: bool
    """RMSNorm of what the MLP gives, before it joins the residual stream."""


class Mlp:
    """The dense feed-forward part of a layer. Fill it by way of `parameters()` before use."""

    def __init__(
        self,
        spec: MlpSpec,
        backend: Backend,
        scheme: Scheme,
        *,
        layer: str,
        dtype: torch.dtype,
        adapters: Adapters | None = None,
        shard: Shard = WHOLE,
    ) -> None:
        """`layer`: the layer's name in the checkpoint; `dtype`: the model's; `adapters`: see JoinedLinear; `shard`:
        whose part it is."""
        self._spec = spec
        self._shard = shard
        self._backend = backend
        self._gate_mul = backend.gelu_mul if spec.gelu else backend.silu_mul
        hidden, inner, prefix = spec.hidden_size, spec.intermediate_size, f"{layer}.mlp"
        gate_up = {f"{prefix}.gate_proj": inner, f"{prefix}.up_proj": inner}
        outs, ins = dict.fromkeys(gate_up, shard.outs(inner)), {f"{prefix}.down_proj": shard.ins(inner)}
        self._gate_up = JoinedLinear(scheme, hidden, gate_up, bias=spec.bias, adapters=adapters, cuts=outs)
        down = {f"{prefix}.down_proj": hidden}
        self._down = JoinedLinear(scheme, inner, down, bias=spec.bias, adapters=adapters, cuts=ins)
        self._output_norm = f"{layer}.post_feedforward_layernorm"
        # In families with output norms, post_attention_layernorm is attention's output norm instead.
        name = "pre_feedforward_layernorm" if spec.output_norm else "post_attention_layernorm"
        self._input_norm = f"{layer}.{name}"
        norms = [self._input_norm, self._output_norm] if spec.output_norm else [self._input_norm]
        self._norms = NormWeights(dict.fromkeys(norms, hidden), dtype, offset=spec.norm_offset)

    def parameters(self) -> ParameterTable:
        return self._norms.parameters() | self._gate_up.parameters() | self._down.parameters()

    def forward(self, x: Tensor, residual: Tensor, context: LinearContext) -> tuple[Tensor, Tensor]:
        """Returns (output, residual stream), not yet added, for x [T, hidden] and the stream to add it to."""
        parts, backend, eps = self.fusible, self._backend, self._spec.norm_eps
        x, residual = backend.add_rms_norm(x, residual, parts.input_norm, eps)
        x = self._shard.sum(parts.down(self._gate_mul(parts.gate_up(x, context)), context))
        return x if parts.output_norm is None else backend.rms_norm(x, parts.output_norm, eps), residual

    @cached_property
    def fusible(self) -> DenseMlp:
        """What it computes with, once its weights are there."""
        return DenseMlp(
            input_norm=self._norms[self._input_norm],
            gate_up=self._gate_up.packed,
            gelu=self._spec.gelu,
            down=self._down.packed,
            output_norm=self._norms.get(self._output_norm),
        )
