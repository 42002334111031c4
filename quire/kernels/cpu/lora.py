from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.kernels.backend import AdapterSlotSpec, Linear, LinearContext, LinearWithLora, LoraDelta
from quire.kernels.cpu import native_library


@dataclass(frozen=True, slots=True)
class PackedLinearAdapter:
    native: native_library.LoraAdapter
    buffers: tuple[object, ...]


class CompiledLinearWithLora(LinearWithLora):
    def __init__(self, library: native_library.NativeLibrary, linear: Linear, slots: AdapterSlotSpec) -> None:
        self.linear = linear
        self._dtype = slots.dtype
        self._kernel = library.add_adapters[slots.dtype]
        self._adapters = (native_library.LoraAdapter * slots.num_slots)()
        self._packed: list[PackedLinearAdapter | None] = [None] * slots.num_slots
        shape = (slots.in_features, sum(slots.output_sizes), slots.has_float32_output)
        self.native = native_library.LoraLinear(self._adapters, slots.num_slots, *shape)
        self._pointer = ctypes.addressof(self.native)

    def __call__(self, x: Tensor, context: LinearContext) -> Tensor:
        out, adapters = self.linear(x, context), context.adapter_slots
        if adapters is not None:
            if x.dtype != self._dtype or x.shape[1] != self.native.in_ or not out.is_contiguous():
                raise TypeError(f"adapters of {self._dtype} from {self.native.in_} cannot take {list(x.shape)}")
            x, adapters = x.contiguous(), adapters.contiguous()
            pointers = (adapters.data_ptr(), x.data_ptr(), out.data_ptr())
            self._kernel(self._pointer, *pointers, len(x), torch.get_num_threads())
        return out

    def pack_one_adapter(self, deltas: Sequence[LoraDelta]) -> PackedLinearAdapter:
        down = torch.cat([each.down for each in deltas])
        panels = _pack_panels(down, 4 // down.itemsize)
        parts = (native_library.LoraPart * len(deltas))()
        keeps: list[object] = [panels, parts]
        rank = 0
        for index, delta in enumerate(deltas):
            up = _pack_panels(delta.up)
            outs, own = delta.up.shape
            parts[index] = native_library.LoraPart(up.data_ptr(), delta.first_output, outs, rank, own)
            keeps.append(up)
            rank += own
        adapter = native_library.LoraAdapter(panels.data_ptr(), parts, len(deltas), len(panels))
        return PackedLinearAdapter(adapter, tuple(keeps))

    def put_adapter(self, slot: int, packed: PackedLinearAdapter | None) -> None:
        self._adapters[slot - 1] = native_library.LoraAdapter() if packed is None else packed.native
        self._packed[slot - 1] = packed


def _pack_panels(weight: Tensor, together: int = 1) -> Tensor:
    """Reorder [outs, inner] to [outs / 16, inner / together, 16, together], zero-padded."""
    outs, inner = weight.shape
    padded = F.pad(weight, (0, 0, 0, -outs % 16))
    return padded.view(-1, 16, inner // together, together).transpose(1, 2).contiguous()
