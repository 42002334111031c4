"""Layers in pinned host memory (--cpu-offload-gb). A side stream copies each layer to its slot on the GPU while earlier
layers are computed.

After a pass no copy is running, so CUDA graphs can record the pass. Events order the streams: a slot is overwritten
after its layer is computed, and a layer is computed after its copy has arrived.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from quire.kernels.backend import Backend, Linear
from quire.kernels.streaming.layer_streamer import LayerSelector, LayerStreamer

_ALIGNMENT = 256
"""In bytes, as in PyTorch's allocator."""


@runtime_checkable
class OffloadableLinear(Protocol):
    """A linear that reads `offloadable_tensors` at each call, so their storage may move between calls."""

    @property
    def offloadable_tensors(self) -> Sequence[Tensor]: ...


@dataclass(frozen=True, slots=True)
class _OffloadedTensor:
    device_tensor: Tensor
    host_tensor: Tensor


class HostLayerStreamer(LayerStreamer):
    def __init__(self, backend: Backend, device: torch.device, choice: LayerSelector, slots: int) -> None:
        """Copies are synchronous on a CPU, for tests."""
        super().__init__(choice, slots)
        self.backend, self._device = backend, device
        self._offloaded: dict[int, list[_OffloadedTensor]] = {}
        self._copy_stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._copy_events: dict[int, torch.cuda.Event] = {}
        self._host_buffers: dict[int, Tensor] = {}
        self._slots: list[Tensor] = []

    def set_expected_layer_bytes(self, sizes: Sequence[int]) -> None:
        self.choose_streamed_layers(sizes)

    def register_packed_linear(self, layer: int, linear: Linear) -> None:
        """Move the linear's tensors off the device, so that loading never needs much more memory than the resident
        layers.
        """
        if not self.is_streamed(layer) or not isinstance(linear, OffloadableLinear):
            return
        for tensor in linear.offloadable_tensors:
            if not tensor.is_contiguous():  # tensors are copied as bytes
                continue
            self._offloaded.setdefault(layer, []).append(
                _OffloadedTensor(tensor, tensor.cpu().clone().view(tensor.shape))
            )
            tensor.set_(tensor.new_empty(0))

    @torch.inference_mode()
    def finish_loading(self) -> None:
        if len(self._offloaded) < len(self.streamed_layers):
            raise ValueError(f"the linears of backend {self.backend.name!r} cannot be moved")
        size = max(sum(_padded_bytes(each.host_tensor) for each in held) for held in self._offloaded.values())
        pinned = self._device.type == "cuda"
        self._slots = [torch.empty(size, dtype=torch.uint8, device=self._device) for _ in self.initial_layers]
        for layer, held in self._offloaded.items():
            block = torch.empty(
                sum(_padded_bytes(each.host_tensor) for each in held), dtype=torch.uint8, pin_memory=pinned
            )
            slot, begin = self._slots[self.slot_of(layer)], 0
            for each in held:
                part = slice(begin, begin + each.host_tensor.nbytes)
                block[part].copy_(each.host_tensor.flatten().view(torch.uint8))
                each.device_tensor.set_(slot[part].view(each.host_tensor.dtype).view(each.host_tensor.shape))  # type: ignore[call-overload]
                begin += _padded_bytes(each.host_tensor)
            self._host_buffers[layer] = block
        self._offloaded.clear()

    @property
    def saved_bytes(self) -> int:
        return sum(each.nbytes for each in self._host_buffers.values()) - sum(each.nbytes for each in self._slots)

    @property
    def summary(self) -> str:
        host, slots = (sum(each.nbytes for each in some) / 2**30 for some in (self._host_buffers.values(), self._slots))
        return (
            f"layers: {len(self.streamed_layers):,} are in host memory, {host:.2f} GiB, "
            f"and are copied to the device in each step, into {slots:.2f} GiB reserved for them"
        )

    def begin_pass(self) -> None:
        if self._copy_stream is not None:
            self._copy_stream.wait_stream(torch.cuda.current_stream(self._device))
        for layer in self.initial_layers:
            self._start_copy(layer)

    def enter_layer(self, layer: int) -> None:
        if self._copy_stream is not None and self.is_streamed(layer):
            torch.cuda.current_stream(self._device).wait_event(self._copy_events[layer])

    def leave_layer(self, layer: int) -> None:
        if not self.is_streamed(layer) or (following := self.next_in_slot(layer)) is None:
            return
        if self._copy_stream is not None:
            self._copy_stream.wait_event(torch.cuda.current_stream(self._device).record_event())
        self._start_copy(following)

    def _start_copy(self, layer: int) -> None:
        block, copies = self._host_buffers[layer], self._copy_stream
        with contextlib.nullcontext() if copies is None else torch.cuda.stream(copies):
            self._slots[self.slot_of(layer)][: len(block)].copy_(block, non_blocking=True)
            if copies is not None:
                self._copy_events[layer] = copies.record_event()


def _padded_bytes(tensor: Tensor) -> int:
    return -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
