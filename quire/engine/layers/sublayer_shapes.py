from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from quire.engine.architecture.norm import NormSpec
from quire.engine.architecture.parameter_shapes import ParameterShapes
from quire.engine.layers.linear import FusedLinear, Projection
from quire.engine.layers.norm import NormWeights
from quire.engine.layers.parameters import ParameterTable, identity, make_loadable_parameter
from quire.engine.layers.shard import LinearSlice
from quire.engine.layers.sublayer import BuildContext


class SublayerShapes:
    def __init__(self, shapes: ParameterShapes, build_context: BuildContext) -> None:
        self._shapes = shapes
        self._build_context = build_context

    def with_context(self, **fields: Any) -> SublayerShapes:
        return SublayerShapes(self._shapes, replace(self._build_context, **fields))

    def __contains__(self, linear: str) -> bool:
        return f"{linear}.weight" in self._shapes

    def output_sizes(self, linears: Iterable[str]) -> dict[str, int]:
        return {name: self._shapes[f"{name}.weight"][0] for name in linears}

    def in_features(self, linear: str) -> int:
        return self._shapes[f"{linear}.weight"][1]

    def rows_and_columns(self, table: str) -> tuple[int, int]:
        rows, columns = self._shapes[f"{table}.weight"]
        return rows, columns

    def has_bias(self, linear: str) -> bool:
        return f"{linear}.bias" in self._shapes

    def make_linear(
        self,
        linears: Sequence[str],
        slices: Mapping[str, LinearSlice] | None = None,
        *,
        takes_bias: bool = True,
        wide: bool = False,
    ) -> FusedLinear:
        """`takes_bias` is False if make_parameters loads the bias. `wide`: results are float32."""
        build_context, first = self._build_context, linears[0]
        return FusedLinear(
            build_context.scheme,
            self.in_features(first),
            self.output_sizes(linears),
            bias=takes_bias and self.has_bias(first),
            wide=wide,
            adapters=build_context.adapters,
            cuts=slices,
        )

    def make_projection(self, linears: Sequence[str], slices: Mapping[str, LinearSlice]) -> Projection:
        build_context, first = self._build_context, linears[0]
        return build_context.make_linear(
            build_context.scheme,
            self.in_features(first),
            self.output_sizes(linears),
            bias=self.has_bias(first),
            adapters=build_context.adapters,
            cuts=slices,
        )

    def make_norms(self, names: Iterable[str], norm: NormSpec) -> NormWeights:
        sizes = self.output_sizes(name for name in names if name in self)
        return NormWeights(sizes, self._build_context.dtype, norm)

    def make_parameters(
        self,
        weights: dict[str, Tensor],
        prefix: str,
        names: Iterable[str],
        slice_tensor: Callable[[Tensor], Tensor] = identity,
        transform: Callable[[Tensor], Tensor] = identity,
    ) -> ParameterTable:
        """Makes float32 parameters. Ignores missing names."""
        shapes = {name: self._shapes.get(f"{prefix}.{name}") for name in names}
        return {
            f"{prefix}.{name}": make_loadable_parameter(weights, name, shape, torch.float32, transform, slice_tensor)
            for name, shape in shapes.items()
            if shape is not None
        }
