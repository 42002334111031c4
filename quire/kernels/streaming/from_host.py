"""Layers of a GPU's model in the host's memory (--cpu-offload-gb): each lies there in one piece of pinned memory, which
a stream of its own copies to the layer's slot on the GPU while the layers before it are computed.

A pass copies all that it needs, from its first layer on, and leaves nothing on its way: so it may be captured into a
CUDA graph, copies included, and be followed by any other. A slot is overwritten behind the event that says that its
layer was computed; a layer is computed behind the event that says that its copy has arrived.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from quire.kernels.backend import Backend, Linear
from quire.kernels.streaming.layers import Choice, StreamedLayers

_ALIGNED = 256
"""Bytes: a tensor begins at a multiple of it, as those that PyTorch allocates."""


@runtime_checkable
class Movable(Protocol):
    """A linear that reads these tensors at each call, wherever they lie then."""

    @property
    def movable(self) -> Sequence[Tensor]: ...


@dataclass(frozen=True, slots=True)
class _Held:
    here: Tensor
    """What kernels read."""
    host: Tensor


class LayersFromHost(StreamedLayers):
    def __init__(self, backend: Backend, device: torch.device, choice: Choice, slots: int) -> None:
        """On a CPU, for tests, all is done at once."""
        super().__init__(choice, slots)
        self.backend, self._device = backend, device
        self._held: dict[int, list[_Held]] = {}
        self._copies = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._arrived: dict[int, torch.cuda.Event] = {}
        self._blocks: dict[int, Tensor] = {}
        self._slots: list[Tensor] = []

    def expect(self, sizes: Sequence[int]) -> None:
        self.choose_of(sizes)

    def note(self, layer: int, linear: Linear) -> None:
        """Its tensors leave the device, so that loading never holds more than the layers that stay."""
        if not self.is_streamed(layer) or not isinstance(linear, Movable):
            return
        for tensor in linear.movable:
            if not tensor.is_contiguous():  # one copy takes a layer, as bytes
                continue
            self._held.setdefault(layer, []).append(_Held(tensor, tensor.cpu().clone().view(tensor.shape)))
            tensor.set_(tensor.new_empty(0))

    @torch.inference_mode()
    def settle(self) -> None:
        if len(self._held) < len(self.order):
            raise ValueError(f"the linears of backend {self.backend.name!r} cannot be moved")
        size = max(sum(_padded(each.host) for each in held) for held in self._held.values())
        pinned = self._device.type == "cuda"
        self._slots = [torch.empty(size, dtype=torch.uint8, device=self._device) for _ in self.first]
        for layer, held in self._held.items():
            block = torch.empty(sum(_padded(each.host) for each in held), dtype=torch.uint8, pin_memory=pinned)
            slot, begin = self._slots[self.slot_of(layer)], 0
            for each in held:
                part = slice(begin, begin + each.host.nbytes)
                block[part].copy_(each.host.flatten().view(torch.uint8))
                each.here.set_(slot[part].view(each.host.dtype).view(each.host.shape))  # type: ignore[call-overload]
                begin += _padded(each.host)
            self._blocks[layer] = block
        self._held.clear()

    @property
    def saved(self) -> int:
        return sum(each.nbytes for each in self._blocks.values()) - sum(each.nbytes for each in self._slots)

    @property
    def said(self) -> str:
        host, slots = (sum(each.nbytes for each in some) / 2**30 for some in (self._blocks.values(), self._slots))
        return (
            f"layers: {len(self.order):,} lie in the host's memory, {host:.2f} GiB, which each step copies to the "
            f"device, where {slots:.2f} GiB are for them"
        )

    def begin(self) -> None:
        if self._copies is not None:
            self._copies.wait_stream(torch.cuda.current_stream(self._device))  # earlier passes have read the slots
        for layer in self.first:
            self._fetch(layer)

    def enter(self, layer: int) -> None:
        if self._copies is not None and self.is_streamed(layer):
            torch.cuda.current_stream(self._device).wait_event(self._arrived[layer])

    def leave(self, layer: int) -> None:
        if not self.is_streamed(layer) or (following := self.after(layer)) is None:
            return
        if self._copies is not None:
            self._copies.wait_event(torch.cuda.current_stream(self._device).record_event())
        self._fetch(following)

    def _fetch(self, layer: int) -> None:
        block, copies = self._blocks[layer], self._copies
        with contextlib.nullcontext() if copies is None else torch.cuda.stream(copies):
            self._slots[self.slot_of(layer)][: len(block)].copy_(block, non_blocking=True)
            if copies is not None:
                self._arrived[layer] = copies.record_event()


def _padded(tensor: Tensor) -> int:
    return -(-tensor.nbytes // _ALIGNED) * _ALIGNED
