"""Layers on a disk: their packed weights lie in a MappedArena's file, of which a thread reads the next layer into
memory while this one is computed. Reads go past the system's own cache where the file system lets them: of a file that
is read from beginning to end again and again, and is larger than that cache, nothing would be found in it."""

from __future__ import annotations

import mmap
import os
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

from torch import Tensor

from quire.kernels.backend import Linear
from quire.kernels.cpu import native
from quire.kernels.cpu.decoder.mapped import Held, MappedArena, point, read_bytes
from quire.kernels.cpu.linear import CompiledLinear
from quire.kernels.streaming.layers import Choice, StreamedLayers
from quire.kernels.streaming.offload import OffloadCounts

_AT_ONCE = 16 << 20
"""Bytes of one read."""


class _Coming(NamedTuple):
    layer: int
    there: Future[None]


class LayersFromDisk(StreamedLayers):
    def __init__(self, arena: MappedArena, choice: Choice, slots: int) -> None:
        """choice: asked once all layers are in the file. `backend` is set by who makes it, for it packs into the
        arena."""
        super().__init__(choice, slots)
        self._arena = arena
        self._held: dict[int, list[Held]] = {}
        self._reader = ThreadPoolExecutor(1, "weights")  # which ends when this is let go
        self._coming: dict[int, _Coming] = {}
        self._read_before = 0

    def note(self, layer: int, linear: Linear) -> None:
        if isinstance(linear, CompiledLinear):
            self._held.setdefault(layer, []).extend(Held(*each) for each in linear.held(linear.native))

    def settle(self) -> None:
        self._arena.settle()
        if not self._held:
            raise ValueError("the compiled kernels do not compute this model's layers here; use another --dtype")
        self._descriptor = self._arena.reopened()
        count = max(self._held) + 1
        self._sizes = [sum(self._size(each) for each in self._held.get(layer, ())) for layer in range(count)]
        self.choose_of(self._sizes)
        kept = [layer for layer in range(count) if not self.is_streamed(layer)]
        self._keeps = [self._place(layer, self._empty(self._sizes[layer])) for layer in kept]
        for layer, memory in zip(kept, self._keeps, strict=True):
            self._read(layer, memory)
        self._slot_bytes = max((self._sizes[layer] for layer in self.order), default=0)
        self._slots = [self._empty(self._slot_bytes) for _ in self.first]
        for layer in self.order:
            self._place(layer, self._slots[self.slot_of(layer)])
        self.begin()
        self._read_before = read_bytes()

    def _size(self, held: Held) -> int:
        """Of whole pages, as reads past the system's cache want it."""
        return self._arena.piece(held.weights).size

    def _empty(self, size: int) -> Tensor:
        """[size] uint8 from the beginning of a page on, with room behind it for what kernels read ahead."""
        whole = native.Arena().empty(size + 2 * mmap.PAGESIZE)
        return whole[-whole.data_ptr() % mmap.PAGESIZE :]

    def _place(self, layer: int, memory: Tensor) -> Tensor:
        """Kernels find the layer's weights there from now on."""
        begin = 0
        for held in self._held.get(layer, ()):
            point(held, memory[begin:])
            begin += self._size(held)
        return memory

    def _read(self, layer: int, memory: Tensor) -> None:
        """Raises OSError."""
        target, begin = memory.numpy().data, 0
        for held in self._held.get(layer, ()):
            piece, done = self._arena.piece(held.weights), 0
            while done < piece.size:
                part = target[begin + done : begin + min(done + _AT_ONCE, piece.size)]
                read = os.preadv(self._descriptor.number, [part], piece.offset + done)
                if not read:
                    raise OSError(f"the file of weights ends at {piece.offset + done:,}")
                done += read
            if not self._descriptor.direct:
                os.posix_fadvise(self._descriptor.number, piece.offset, piece.size, os.POSIX_FADV_DONTNEED)
            begin += piece.size

    @property
    def _streamed_bytes(self) -> int:
        return sum(self._sizes[layer] for layer in self.order)

    @property
    def saved(self) -> int:
        return self._streamed_bytes - len(self._slots) * self._slot_bytes

    @property
    def said(self) -> str:
        total, streamed = sum(self._sizes), self._streamed_bytes
        kept = f"{len(self._sizes) - len(self.order):,} of {len(self._sizes):,} are kept in memory"
        memory = total - self.saved
        return (
            f"layers: {total / 2**30:.2f} GiB in a file on disk; {kept}, a step reads {streamed / 2**30:.2f} GiB, "
            f"and all take {memory / 2**30:.2f} GiB of memory"
        )

    def begin(self) -> None:
        for layer in self.first:
            self._fetch(layer)

    def enter(self, layer: int) -> None:
        if self.is_streamed(layer):
            self._fetch(layer).there.result()

    def leave(self, layer: int) -> None:
        if self.is_streamed(layer):
            following = self.after(layer)
            self._fetch(self.first[self.slot_of(layer)] if following is None else following)  # for the next step

    def _fetch(self, layer: int) -> _Coming:
        """What brings it to its slot, unless it is there, or on its way."""
        slot = self.slot_of(layer)
        coming = self._coming.get(slot)
        if coming is None or coming.layer != layer or (coming.there.done() and coming.there.exception() is not None):
            read, memory = self._reader.submit, self._slots[slot]
            coming = self._coming[slot] = _Coming(layer, read(self._read, layer, memory))
        return coming

    def counts(self) -> OffloadCounts:
        return OffloadCounts(disk_bytes=read_bytes() - self._read_before)
