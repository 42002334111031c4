"""Linears whose inputs and outputs are clamped, as in Gemma 4's towers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quire.engine.architecture.parameter_shapes import CLIPPED_LINEAR_BOUNDS
from quire.engine.layers.schemes import QuantizationScheme, TensorSpec, WrappedScheme
from quire.engine.layers.shard import LinearSlice
from quire.kernels.backend import Linear, LinearContext

_LINEAR_PREFIX = "linear."


class ClippedScheme(WrappedScheme):
    def __init__(self, scheme: QuantizationScheme, *, has_bounds: bool) -> None:
        super().__init__(scheme)
        self._has_bounds = has_bounds

    def linear_tensor_specs(
        self, linear: str, in_features: int, out_features: int, *, bias: bool
    ) -> dict[str, TensorSpec]:
        inner = super().linear_tensor_specs(linear, in_features, out_features, bias=bias)
        bounds = {name: TensorSpec((), torch.float32) for name in CLIPPED_LINEAR_BOUNDS} if self._has_bounds else {}
        return {f"{_LINEAR_PREFIX}{name}": stored for name, stored in inner.items()} | bounds

    def pack_linears(
        self, linears: dict[str, dict[str, Tensor]], cuts: Mapping[str, LinearSlice], *, wide: bool
    ) -> Linear:
        groups = list[_LinearsWithSameBounds]()
        for name, tensors in linears.items():
            bounds = tuple(tensors[each].item() for each in CLIPPED_LINEAR_BOUNDS) if self._has_bounds else ()
            if not groups or groups[-1].bounds != bounds:
                groups.append(_LinearsWithSameBounds(bounds, {}))
            groups[-1].linears[name] = _tensors_without_linear_prefix(tensors)
        packed = [self._scheme.pack_linears(each.linears, cuts, wide=wide) for each in groups]
        if len(packed) == 1 and not self._has_bounds:
            return packed[0]
        return _ClippedLinear([each.bounds for each in groups], packed)

    def dense_weight(self, linear: str, tensors: dict[str, Tensor], cut: LinearSlice) -> Tensor:
        return super().dense_weight(linear, _tensors_without_linear_prefix(tensors), cut)


@dataclass(frozen=True, slots=True)
class _LinearsWithSameBounds:
    bounds: tuple[float, ...]
    linears: dict[str, dict[str, Tensor]]


class _ClippedLinear:
    def __init__(self, bounds: Sequence[tuple[float, ...]], linears: Sequence[Linear]) -> None:
        self._bounded_linears = list(zip(bounds, linears, strict=True))

    def __call__(self, x: Tensor, context: LinearContext) -> Tensor:
        outs = [linear(x.clamp(*b[:2]), context).clamp_(*b[2:]) for b, linear in self._bounded_linears]
        return outs[0] if len(outs) == 1 else torch.cat(outs, dim=1)


def _tensors_without_linear_prefix(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {
        name.removeprefix(_LINEAR_PREFIX): each for name, each in tensors.items() if name.startswith(_LINEAR_PREFIX)
    }
