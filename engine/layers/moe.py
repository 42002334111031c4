"""A mixture of experts in an MLP's place (Shazeer et al., 2017): a router chooses some gated MLPs for each token."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from quire.engine.layers.linear import JoinedLinear
from quire.engine.layers.norm import NormWeights
from quire.engine.layers.parameters import ParameterTable
from quire.engine.layers.schemes import Scheme, Unquantized
from quire.kernels.backend import Backend, Clamp, Experts, LinearContext
from quire.kernels.layers import SparseMlp


@dataclass(frozen=True, slots=True)
class ExpertsSpec:
    """The shape of one layer's experts, and the switches by which families differ."""

    count: int
    per_token: int
    """How many the router chooses."""
    intermediate_size: int
    """Of one expert."""
    normalized: bool
    """The shares of the chosen experts sum to 1; else those of all experts do."""
    router_bias: bool = False
    bias: bool = False
    """Of the experts' linears."""
    clamp: Clamp | None = None
    part: str = "mlp"
    """The part's name in a checkpoint, behind the layer's; and below it the names of the router and, below each
    expert's, those of its linears."""
    router: str = "gate"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"


class Moe:
    """The sparse feed-forward part of a layer. Fill it by way of `parameters()` before use. It has no room for
    adapters."""

    def __init__(
        self,
        spec: ExpertsSpec,
        backend: Backend,
        scheme: Scheme,
        *,
        layer: str,
        dtype: torch.dtype,
        hidden_size: int,
        norm_eps: float,
    ) -> None:
        """`layer`: the layer's name in the checkpoint; `dtype`: the model's."""
        self._spec = spec
        self._backend = backend
        self._eps = norm_eps
        prefix, inner = f"{layer}.{spec.part}", spec.intermediate_size
        router = {f"{prefix}.{spec.router}": spec.count}
        whole = Unquantized(backend, dtype)  # no checkpoint's router has few bits: its choices would change
        self._router = JoinedLinear(whole, hidden_size, router, bias=spec.router_bias, wide=True)
        each = [f"{prefix}.experts.{index}" for index in range(spec.count)]
        self._gate_up = [
            JoinedLinear(
                scheme, hidden_size, {f"{name}.{spec.gate}": inner, f"{name}.{spec.up}": inner}, bias=spec.bias
            )
            for name in each
        ]
        self._down = [
            JoinedLinear(scheme, inner, {f"{name}.{spec.down}": hidden_size}, bias=spec.bias) for name in each
        ]
        self._input_norm = f"{layer}.post_attention_layernorm"
        self._norm = NormWeights({self._input_norm: hidden_size}, dtype, offset=0.0)

    def parameters(self) -> ParameterTable:
        table = self._norm.parameters()
        for linear in (self._router, *self._gate_up, *self._down):
            table |= linear.parameters()
        return table

    def forward(self, x: Tensor, residual: Tensor, context: LinearContext) -> tuple[Tensor, Tensor]:
        """Returns (output, residual stream), not yet added, for x [T, hidden] and the stream to add it to."""
        parts = self.fusible
        x, residual = self._backend.add_rms_norm(x, residual, parts.input_norm, self._eps)
        return parts.experts(x), residual

    @cached_property
    def fusible(self) -> SparseMlp:
        """What it computes with, once its weights are there."""
        spec = self._spec
        experts = Experts(
            router=self._router.packed,
            gate_up=[each.packed for each in self._gate_up],
            down=[each.packed for each in self._down],
            per_token=spec.per_token,
            normalized=spec.normalized,
            clamp=spec.clamp,
        )
        return SparseMlp(self._norm[self._input_norm], self._backend.mixture(experts))
