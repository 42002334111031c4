"""Linears with bounds of what they read and of what they give, as Gemma 4's towers store them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quire.engine.layers.schemes import OtherScheme, Scheme, Stored
from quire.engine.layers.shard import Cut
from quire.kernels.backend import Linear, LinearContext

_WITHIN = "linear."
"""Before the names of what the linear itself has."""
_BOUNDS = ("input_min", "input_max", "output_min", "output_max")


class Clippable(OtherScheme):
    def __init__(self, scheme: Scheme, *, clipped: bool) -> None:
        """`scheme`: of the linears without their bounds; clipped: they have some."""
        super().__init__(scheme)
        self._clipped = clipped

    def tensors(self, linear: str, in_features: int, out_features: int, *, bias: bool) -> dict[str, Stored]:
        inner = super().tensors(linear, in_features, out_features, bias=bias)
        bounds = {name: Stored((), torch.float32) for name in _BOUNDS} if self._clipped else {}
        return {f"{_WITHIN}{name}": stored for name, stored in inner.items()} | bounds

    def pack(self, linears: dict[str, dict[str, Tensor]], cuts: Mapping[str, Cut], *, wide: bool) -> Linear:
        """Those of other bounds than their neighbours' multiply by themselves."""
        parts = list[_Part]()
        for name, tensors in linears.items():
            bounds = tuple(tensors[each].item() for each in _BOUNDS) if self._clipped else ()
            if not parts or parts[-1].bounds != bounds:
                parts.append(_Part(bounds, {}))
            parts[-1].linears[name] = _inner(tensors)
        packed = [self._scheme.pack(each.linears, cuts, wide=wide) for each in parts]
        if len(packed) == 1 and not self._clipped:
            return packed[0]
        return _Clipped([each.bounds for each in parts], packed)

    def dense(self, linear: str, tensors: dict[str, Tensor], cut: Cut) -> Tensor:
        return super().dense(linear, _inner(tensors), cut)


@dataclass(frozen=True, slots=True)
class _Part:
    """Linears side by side that have the same bounds."""

    bounds: tuple[float, ...]
    linears: dict[str, dict[str, Tensor]]


class _Clipped:
    def __init__(self, bounds: Sequence[tuple[float, ...]], linears: Sequence[Linear]) -> None:
        self._parts = list(zip(bounds, linears, strict=True))

    def __call__(self, x: Tensor, context: LinearContext) -> Tensor:
        outs = [linear(x.clamp(*b[:2]), context).clamp_(*b[2:]) for b, linear in self._parts]
        return outs[0] if len(outs) == 1 else torch.cat(outs, dim=1)


def _inner(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(_WITHIN): each for name, each in tensors.items() if name.startswith(_WITHIN)}
