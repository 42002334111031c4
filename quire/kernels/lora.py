"""Adapters behind a linear in plain PyTorch: the judge of kernels/cpu/lora.cpp and of Triton's kernels."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from quire.kernels.backend import AdaptedLinear, Delta, Linear, LinearContext


class ReferenceAdaptedLinear(AdaptedLinear):
    """Row by row: a product of one shape gives a row the same bits whatever the others are."""

    def __init__(self, linear: Linear) -> None:
        self._linear = linear
        self._slots: dict[int, Sequence[Delta]] = {}

    def __call__(self, x: Tensor, context: LinearContext) -> Tensor:
        out = self._linear(x, context)
        if context.adapters is not None:
            for row, slot in enumerate(context.adapters.tolist()):
                for delta in self._slots.get(slot, ()):
                    columns = slice(delta.first, delta.first + len(delta.up))
                    out[row, columns] = (out[row, columns].to(_wide(x)) + _product(delta, x[row])).to(out.dtype)
        return out

    def pack(self, deltas: Sequence[Delta]) -> Sequence[Delta]:
        return deltas

    def put(self, slot: int, packed: Sequence[Delta] | None) -> None:
        self._slots[slot] = packed or ()


def _product(delta: Delta, row: Tensor) -> Tensor:
    """[in] to [outs], in float32 or what is wider."""
    wide = _wide(row)
    return delta.up.to(wide) @ (delta.down.to(wide) @ row.to(wide))


def _wide(x: Tensor) -> torch.dtype:
    return x.dtype if x.dtype == torch.float64 else torch.float32
