"""A norm of what parts have given together, and a factor of the residual stream at a layer's end."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from quire.engine.layers.norm import NormSpec, NormWeights
from quire.engine.layers.parameters import ParameterTable, held
from quire.engine.layers.part import BuildContext, Step, Sublayer, SublayerSpec, times
from quire.kernels.backend import Operations


@dataclass(frozen=True, slots=True)
class OutputNormSpec(SublayerSpec):
    """Norm of what the parts before give, before it joins the residual stream."""

    norm: NormSpec
    name: str
    """In a checkpoint, behind the layer's."""

    def part(self, making: BuildContext, layer: str) -> OutputNorm:
        return OutputNorm(self, making, layer)


class OutputNorm(Sublayer):
    def __init__(self, spec: OutputNormSpec, making: BuildContext, layer: str) -> None:
        self._name = f"{layer}.{spec.name}"
        self._norms = NormWeights({self._name: making.hidden_size}, making.dtype, spec.norm)

    def parameters(self) -> ParameterTable:
        return self._norms.parameters()

    def forward(self, run: Operations, x: Tensor, residual: Tensor | None, step: Step) -> tuple[Tensor, Tensor]:
        assert residual is not None
        return self._norms.norm(run, self._name, x), residual


@dataclass(frozen=True, slots=True)
class ScaleSpec(SublayerSpec):
    """The residual stream, and what is to be added to it, times a learned number."""

    name: str
    """In a checkpoint, behind the layer's."""

    def part(self, making: BuildContext, layer: str) -> Scale:
        return Scale(self, layer)


class Scale(Sublayer):
    def __init__(self, spec: ScaleSpec, layer: str) -> None:
        self._name, self._weights = f"{layer}.{spec.name}", dict[str, Tensor]()

    def parameters(self) -> ParameterTable:
        return {self._name: held(self._weights, self._name, (1,), torch.float32)}

    @cached_property
    def _factor(self) -> float:
        """Once its weight is there."""
        return self._weights[self._name].item()

    def forward(self, run: Operations, x: Tensor, residual: Tensor | None, step: Step) -> tuple[Tensor, Tensor]:
        assert residual is not None
        return times(run, x, self._factor), times(run, residual, self._factor)
