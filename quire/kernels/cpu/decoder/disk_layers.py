"""A thread reads the next layer while the current one is computed. Reads bypass the page cache if possible, because
caching does not help when a file larger than the cache is read repeatedly.
"""

from __future__ import annotations

import mmap
import os
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

from torch import Tensor

from quire.kernels.backend import Linear
from quire.kernels.cpu import native_library
from quire.kernels.cpu.decoder.mapped_experts import (
    MappedWeightArena,
    RelocatableWeights,
    disk_read_bytes,
    set_weights_pointer,
)
from quire.kernels.cpu.linear import CompiledLinearBase
from quire.kernels.streaming.layer_streamer import LayerSelector, LayerStreamer
from quire.kernels.streaming.weight_offloader import OffloadCounts

_READ_BYTES = 16 << 20


class _PendingRead(NamedTuple):
    layer: int
    done: Future[None]


class DiskLayerStreamer(LayerStreamer):
    def __init__(self, arena: MappedWeightArena, choice: LayerSelector, slots: int) -> None:
        """`choice` is called once all layers are in the file. The caller must set a `backend` that packs into
        `arena`.
        """
        super().__init__(choice, slots)
        self._arena = arena
        self._buffers: dict[int, list[RelocatableWeights]] = {}
        self._reader = ThreadPoolExecutor(1, "weights")  # ends when this object is freed
        self._pending_reads: dict[int, _PendingRead] = {}
        self._initial_disk_bytes = 0

    def register_packed_linear(self, layer: int, linear: Linear) -> None:
        if isinstance(linear, CompiledLinearBase):
            self._buffers.setdefault(layer, []).extend(
                RelocatableWeights(*each) for each in linear.pointer_addresses_and_weights(linear.native)
            )

    def finish_loading(self) -> None:
        self._arena.flush_and_drop_pages()
        if not self._buffers:
            raise ValueError("the compiled kernels do not compute this model's layers here; use another --dtype")
        self._file = self._arena.reopen_for_direct_io()
        count = max(self._buffers) + 1
        self._layer_bytes = [
            sum(self._buffer_extent_bytes(each) for each in self._buffers.get(layer, ())) for layer in range(count)
        ]
        self.choose_streamed_layers(self._layer_bytes)
        resident = [layer for layer in range(count) if not self.is_streamed(layer)]
        self._resident_layers = [
            self._set_layer_pointers(layer, self._allocate_aligned(self._layer_bytes[layer])) for layer in resident
        ]
        for layer, memory in zip(resident, self._resident_layers, strict=True):
            self._read_layer(layer, memory)
        self._slot_bytes = max((self._layer_bytes[layer] for layer in self.streamed_layers), default=0)
        self._slots = [self._allocate_aligned(self._slot_bytes) for _ in self.initial_layers]
        for layer in self.streamed_layers:
            self._set_layer_pointers(layer, self._slots[self.slot_of(layer)])
        self.begin_pass()
        self._initial_disk_bytes = disk_read_bytes()

    def _buffer_extent_bytes(self, held: RelocatableWeights) -> int:
        """The result is rounded up to pages, for direct I/O."""
        return self._arena.file_extent(held.weights).size

    def _allocate_aligned(self, size: int) -> Tensor:
        """Return page-aligned memory of `size` bytes plus at least one page, because kernels read past the weights."""
        whole = native_library.WeightArena().allocate_bytes(size + 2 * mmap.PAGESIZE)
        return whole[-whole.data_ptr() % mmap.PAGESIZE :]

    def _set_layer_pointers(self, layer: int, memory: Tensor) -> Tensor:
        begin = 0
        for held in self._buffers.get(layer, ()):
            set_weights_pointer(held, memory[begin:])
            begin += self._buffer_extent_bytes(held)
        return memory

    def _read_layer(self, layer: int, memory: Tensor) -> None:
        """Raises OSError."""
        target, begin = memory.numpy().data, 0
        for held in self._buffers.get(layer, ()):
            piece, done = self._arena.file_extent(held.weights), 0
            while done < piece.size:
                part = target[begin + done : begin + min(done + _READ_BYTES, piece.size)]
                read = os.preadv(self._file.descriptor, [part], piece.offset + done)
                if not read:
                    raise OSError(f"the file of weights ends at {piece.offset + done:,}")
                done += read
            if not self._file.is_direct:
                os.posix_fadvise(self._file.descriptor, piece.offset, piece.size, os.POSIX_FADV_DONTNEED)
            begin += piece.size

    @property
    def _bytes_per_pass(self) -> int:
        return sum(self._layer_bytes[layer] for layer in self.streamed_layers)

    @property
    def saved_bytes(self) -> int:
        return self._bytes_per_pass - len(self._slots) * self._slot_bytes

    @property
    def summary(self) -> str:
        total, streamed = sum(self._layer_bytes), self._bytes_per_pass
        resident_text = (
            f"{len(self._layer_bytes) - len(self.streamed_layers):,} of {len(self._layer_bytes):,} are kept in memory"
        )
        memory = total - self.saved_bytes
        return (
            f"layers: {total / 2**30:.2f} GiB in a file on disk; {resident_text}, "
            f"a step reads {streamed / 2**30:.2f} GiB, "
            f"and all take {memory / 2**30:.2f} GiB of memory"
        )

    def begin_pass(self) -> None:
        for layer in self.initial_layers:
            self._start_read(layer)

    def enter_layer(self, layer: int) -> None:
        if self.is_streamed(layer):
            self._start_read(layer).done.result()

    def leave_layer(self, layer: int) -> None:
        if self.is_streamed(layer):
            following = self.next_in_slot(layer)
            self._start_read(self.initial_layers[self.slot_of(layer)] if following is None else following)

    def _start_read(self, layer: int) -> _PendingRead:
        """Repeats the read if the last one failed."""
        slot = self.slot_of(layer)
        pending = self._pending_reads.get(slot)
        if pending is None or pending.layer != layer or (pending.done.done() and pending.done.exception() is not None):
            read, memory = self._reader.submit, self._slots[slot]
            pending = self._pending_reads[slot] = _PendingRead(layer, read(self._read_layer, layer, memory))
        return pending

    def total_offload_counts(self) -> OffloadCounts:
        return OffloadCounts(disk_bytes=disk_read_bytes() - self._initial_disk_bytes)
