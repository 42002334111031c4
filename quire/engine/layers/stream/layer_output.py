"""A norm of what parts have given together, and a factor of the residual stream at a layer's end."""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from quire.engine.architecture.stream import LayerScalarSpec, OutputNormSpec
from quire.engine.layers.norm import NormWeights
from quire.engine.layers.parameters import ParameterTable, make_loadable_parameter
from quire.engine.layers.sublayer import BuildContext, ForwardContext, Sublayer, scale_tensor
from quire.kernels.backend import Operations


class OutputNorm(Sublayer):
    def __init__(self, spec: OutputNormSpec, build_context: BuildContext, layer: str) -> None:
        self._norm_name = f"{layer}.{spec.norm_name}"
        self._norms = NormWeights({self._norm_name: build_context.hidden_size}, build_context.dtype, spec.norm)

    def parameters(self) -> ParameterTable:
        return self._norms.parameters()

    def forward(
        self, ops: Operations, x: Tensor, residual: Tensor | None, step: ForwardContext
    ) -> tuple[Tensor, Tensor]:
        assert residual is not None
        return self._norms.apply_norm(ops, self._norm_name, x), residual


class LayerScalar(Sublayer):
    def __init__(self, spec: LayerScalarSpec, build_context: BuildContext, layer: str) -> None:
        self._scalar_name, self._weights = f"{layer}.{spec.scalar_name}", dict[str, Tensor]()

    def parameters(self) -> ParameterTable:
        return {self._scalar_name: make_loadable_parameter(self._weights, self._scalar_name, (1,), torch.float32)}

    @cached_property
    def _scalar(self) -> float:
        """Once its weight is there."""
        return self._weights[self._scalar_name].item()

    def forward(
        self, ops: Operations, x: Tensor, residual: Tensor | None, step: ForwardContext
    ) -> tuple[Tensor, Tensor]:
        assert residual is not None
        return scale_tensor(ops, x, self._scalar), scale_tensor(ops, residual, self._scalar)
