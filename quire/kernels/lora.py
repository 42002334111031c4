from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from quire.kernels.backend import Linear, LinearContext, LinearWithLora, LoraDelta


class ReferenceLinearWithLora(LinearWithLora):
    """Computes row by row, because products of one shape give a row the same bits in every batch."""

    def __init__(self, linear: Linear) -> None:
        self._linear = linear
        self._slots: dict[int, Sequence[LoraDelta]] = {}

    def __call__(self, x: Tensor, context: LinearContext) -> Tensor:
        out = self._linear(x, context)
        if context.adapter_slots is not None:
            for row, slot in enumerate(context.adapter_slots.tolist()):
                for delta in self._slots.get(slot, ()):
                    columns = slice(delta.first_output, delta.first_output + len(delta.up))
                    out[row, columns] = (out[row, columns].to(_compute_dtype(x)) + _lora_product(delta, x[row])).to(
                        out.dtype
                    )
        return out

    def pack_one_adapter(self, deltas: Sequence[LoraDelta]) -> Sequence[LoraDelta]:
        return deltas

    def put_adapter(self, slot: int, packed: Sequence[LoraDelta] | None) -> None:
        self._slots[slot] = packed or ()


def _lora_product(delta: LoraDelta, row: Tensor) -> Tensor:
    """Return the delta for one row, in float32 or float64."""
    wide = _compute_dtype(row)
    return delta.up.to(wide) @ (delta.down.to(wide) @ row.to(wide))


def _compute_dtype(x: Tensor) -> torch.dtype:
    return x.dtype if x.dtype == torch.float64 else torch.float32
