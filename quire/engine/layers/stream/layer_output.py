from __future__ import annotations

from functools import cached_property

from torch import Tensor

from quire.engine.architecture.stream import LayerScalarSpec, OutputNormSpec
from quire.engine.layers.parameters import ParameterTable
from quire.engine.layers.sublayer import BuildContext, ForwardContext, Sublayer, scale_tensor
from quire.engine.layers.sublayer_shapes import SublayerShapes
from quire.kernels.backend import Operations


class OutputNorm(Sublayer):
    def __init__(self, spec: OutputNormSpec, build_context: BuildContext, layer: str) -> None:
        self._norm_name = f"{layer}.{spec.norm_name}"
        self._norms = SublayerShapes(spec.parameter_shapes(layer, build_context.hidden_size), build_context).make_norms(
            [self._norm_name], spec.norm
        )

    def parameters(self) -> ParameterTable:
        return self._norms.parameters()

    def forward(
        self, ops: Operations, x: Tensor, residual: Tensor | None, step: ForwardContext
    ) -> tuple[Tensor, Tensor]:
        assert residual is not None
        return self._norms.apply_norm(ops, self._norm_name, x), residual


class LayerScalar(Sublayer):
    def __init__(self, spec: LayerScalarSpec, build_context: BuildContext, layer: str) -> None:
        self._layer, self._scalar_name = layer, spec.scalar_name
        self._weights: dict[str, Tensor] = {}
        self._shapes = SublayerShapes(spec.parameter_shapes(layer, build_context.hidden_size), build_context)

    def parameters(self) -> ParameterTable:
        return self._shapes.make_parameters(self._weights, self._layer, [self._scalar_name])

    @cached_property
    def _scalar(self) -> float:
        return self._weights[self._scalar_name].item()

    def forward(
        self, ops: Operations, x: Tensor, residual: Tensor | None, step: ForwardContext
    ) -> tuple[Tensor, Tensor]:
        assert residual is not None
        return scale_tensor(ops, x, self._scalar), scale_tensor(ops, residual, self._scalar)
