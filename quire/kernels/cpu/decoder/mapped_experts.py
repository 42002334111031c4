"""Experts in a memory-mapped file.

The OS reads weights when they are used, and drops them when memory is short. The most used experts are copied to pinned
slots in memory. Bits are the same as with all weights in memory.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from quire.kernels.cpu import native_library
from quire.kernels.experts import DiskExperts
from quire.kernels.streaming.weight_offloader import OffloadCounts

_CHUNK_BYTES = 64 << 20
"""Minimum bytes per mapping. Loading writes each mapping to disk before it creates the next."""
_MAX_MOVED_BYTES = 64 << 20
"""Maximum bytes that one rebalance copies, if this is enough for one expert."""
_REPLACEMENT_FACTOR = 1.25
"""An expert replaces a pinned one if it is used more than this many times as often."""
_PROCESS_IO_FILE = Path("/proc/self/io")
_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class RelocatableWeights(NamedTuple):
    pointer_address: int
    weights: Tensor
    """[bytes] uint8."""


class ReopenedFile:
    """A second descriptor of an open file, for direct I/O if the file system allows it. The file may be unnamed."""

    def __init__(self, descriptor: int) -> None:
        again, flags = f"/proc/self/fd/{descriptor}", os.O_RDONLY | os.O_CLOEXEC
        try:
            self.descriptor, self.is_direct = os.open(again, flags | os.O_DIRECT), True
        except OSError:
            self.descriptor, self.is_direct = os.open(again, flags), False

    def __del__(self) -> None:
        os.close(self.descriptor)


class _FileExtent(NamedTuple):
    address: int
    """Page-aligned."""
    offset: int
    size: int


class MappedWeightArena(native_library.WeightArena):
    """Memory for weights in an unnamed file, which is deleted when the process ends."""

    def __init__(self, folder: Path) -> None:
        """Raises OSError if it cannot create a file."""
        super().__init__()
        self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115
        self._size = 0
        self._chunks: list[tuple[mmap.mmap, int]] = []  # pairs (mapping, its offset in the file)
        self._extents: dict[int, _FileExtent] = {}
        self.moes: list[tuple[native_library.Experts, Sequence[Sequence[RelocatableWeights]]]] = []
        """For each layer, the kernel's struct and each expert's weights."""

    def allocate_bytes(self, size: int) -> Tensor:
        """Return [size] uint8 on pages that no other weights use. Raises OSError."""
        rounded = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
        if rounded > len(self._free_bytes):
            self._map_chunk(max(_CHUNK_BYTES, rounded))
        piece = self._free_bytes[:size]
        offset = self._size - mmap.PAGESIZE - len(self._free_bytes)
        self._extents[piece.data_ptr()] = _FileExtent(piece.data_ptr(), offset, rounded)
        self._free_bytes = self._free_bytes[rounded:]
        return piece

    def _map_chunk(self, size: int) -> None:
        """Map `size` more bytes of the file, and one more page, because kernels read past the weights. Reserves disk
        space, because writing to an unreserved part of a mapped file on a full disk would kill the process.
        """
        self._flush_chunks(self._chunks[-1:])
        descriptor, whole = self._file.fileno(), size + mmap.PAGESIZE
        os.posix_fallocate(descriptor, self._size, whole)
        chunk = mmap.mmap(descriptor, whole, flags=mmap.MAP_SHARED, offset=self._size)
        self._chunks.append((chunk, self._size))
        self._size += whole
        self._free_bytes = torch.frombuffer(chunk, dtype=torch.uint8)[:size]

    def _flush_chunks(self, chunks: Sequence[tuple[mmap.mmap, int]]) -> None:
        for chunk, offset in chunks:
            chunk.flush()
            chunk.madvise(mmap.MADV_DONTNEED)
            os.posix_fadvise(self._file.fileno(), offset, len(chunk), os.POSIX_FADV_DONTNEED)

    def flush_and_drop_pages(self) -> None:
        self._flush_chunks(self._chunks)

    def reopen_for_direct_io(self) -> ReopenedFile:
        return ReopenedFile(self._file.fileno())

    def file_extent(self, weights: Tensor) -> _FileExtent:
        return self._extents[weights.data_ptr()]

    def prefetch_weights(self, weights: Tensor) -> None:
        piece = self.file_extent(weights)
        _LIBC.madvise(piece.address, piece.size, mmap.MADV_WILLNEED)

    def drop_pages(self, weights: Tensor) -> None:
        piece = self.file_extent(weights)
        _LIBC.madvise(piece.address, piece.size, mmap.MADV_DONTNEED)
        os.posix_fadvise(self._file.fileno(), piece.offset, piece.size, os.POSIX_FADV_DONTNEED)


@dataclass(frozen=True, slots=True)
class _ExpertTables:
    structs: Sequence[native_library.MappedExperts]
    extent_lists: Sequence[object]
    starts: Sequence[Tensor]
    pinned: Tensor  # [experts] uint8
    prefetched: Tensor  # [experts] uint8
    uses: Tensor  # [experts] int64
    counts: Tensor  # [4] int64: the first four OffloadCounts


class MappedDiskExperts(DiskExperts):
    def __init__(self, arena: MappedWeightArena, memory: int) -> None:
        """memory: bytes for the most used experts. The caller must set a `backend` that packs into the arena."""
        self._arena, self._memory = arena, memory
        self.rebalance_interval = 32
        """In steps."""
        self._steps = self._initial_disk_bytes = 0

    def finish_loading(self) -> None:
        self._arena.flush_and_drop_pages()
        mixtures = self._arena.moes
        if not mixtures:
            raise ValueError("the compiled kernels do not compute this model's experts here; use another --dtype")
        self._experts = [expert for _, experts in mixtures for expert in experts]
        self._tables = _build_expert_tables(self._arena)
        self.set_prefetching(is_on=True)
        places = torch.cat([torch.arange(len(experts)) for _, experts in mixtures])
        self._layer_major_order = places.argsort(stable=True)
        self._scores = torch.zeros(len(self._experts))
        self._pin_initial_experts()
        self._initial_disk_bytes = disk_read_bytes()

    def _pin_initial_experts(self) -> None:
        """Pin about the same number of experts in each layer, because it is still unknown which ones are used most."""
        self._slot_bytes = max(sum(_aligned_bytes(held.weights) for held in expert) for expert in self._experts)
        slots = min(self._memory // self._slot_bytes, len(self._experts))
        if self._memory and not slots:
            raise ValueError(f"an expert takes {self._slot_bytes:,} bytes, more than are to be in memory")
        self._slots = native_library.WeightArena().allocate_bytes(slots * self._slot_bytes)
        self._slot_of: dict[int, int] = {}
        for slot, expert in enumerate(self._layer_major_order[:slots].tolist()):
            self._copy_expert_to_slot(expert, slot)

    @property
    def total_bytes(self) -> int:
        return sum(len(held.weights) for expert in self._experts for held in expert)

    @property
    def saved_bytes(self) -> int:
        return self.total_bytes - len(self._slots)

    @property
    def summary(self) -> str:
        pinned_text = (
            f"{len(self._slot_of):,} of {len(self._experts):,} are kept in memory ({len(self._slots) / 2**30:.2f} GiB)"
        )
        return (
            f"experts: {self.total_bytes / 2**30:.2f} GiB in a file on disk; "
            f"{pinned_text}, the others while the system has room"
        )

    def drop_cached_pages(self) -> None:
        """Make the OS drop the pages of all experts, for measurements."""
        self._arena.flush_and_drop_pages()

    def set_prefetching(self, is_on: bool) -> None:
        """Likely experts of the next layer are prefetched. Measurements turn this off."""
        following = [*(ctypes.addressof(each) for each, _ in self._arena.moes[1:]), None]
        for noted, mixture in zip(self._tables.structs, following, strict=True):
            noted.next = mixture if is_on else None

    def prepare_for_step(self) -> None:
        self._steps += 1
        if self._steps % self.rebalance_interval == 0 and 0 < len(self._slot_of) < len(self._experts):
            self._rebalance_pinned()

    def _rebalance_pinned(self) -> None:
        self._scores = self._scores / 2 + self._tables.uses
        self._tables.uses.zero_()
        wanted = self._layer_major_order[
            self._scores[self._layer_major_order].argsort(descending=True, stable=True)
        ].tolist()
        better = [expert for expert in wanted[: len(self._slot_of)] if expert not in self._slot_of]
        worst = [expert for expert in reversed(wanted) if expert in self._slot_of]
        scores = self._scores.tolist()
        for new, old in zip(better[: max(_MAX_MOVED_BYTES // self._slot_bytes, 1)], worst, strict=False):
            if scores[new] <= scores[old] * _REPLACEMENT_FACTOR:
                break
            self._copy_expert_to_slot(new, self._reclaim_expert_slot(old))

    def _copy_expert_to_slot(self, expert: int, slot: int) -> None:
        for held in self._experts[expert]:
            self._arena.prefetch_weights(held.weights)
        begin = slot * self._slot_bytes
        for held in self._experts[expert]:
            copy = self._slots[begin : begin + len(held.weights)]
            copy.copy_(held.weights)
            set_weights_pointer(held, copy)
            self._arena.drop_pages(held.weights)
            begin += _aligned_bytes(held.weights)
        self._slot_of[expert], self._tables.pinned[expert] = slot, 1

    def _reclaim_expert_slot(self, expert: int) -> int:
        for held in self._experts[expert]:
            set_weights_pointer(held, held.weights)
        self._tables.pinned[expert] = 0
        return self._slot_of.pop(expert)

    def total_offload_counts(self) -> OffloadCounts:
        experts_read, experts_kept, experts_guessed, guessed_right = self._tables.counts.tolist()
        return OffloadCounts(
            experts_read, experts_kept, experts_guessed, guessed_right, disk_read_bytes() - self._initial_disk_bytes
        )


def _build_expert_tables(arena: MappedWeightArena) -> _ExpertTables:
    mixtures = arena.moes
    total = sum(len(experts) for _, experts in mixtures)
    pinned, prefetched = torch.zeros(total, dtype=torch.uint8), torch.zeros(total, dtype=torch.uint8)
    uses, counts = torch.zeros(total, dtype=torch.int64), torch.zeros(4, dtype=torch.int64)
    structs = list[native_library.MappedExperts]()
    lists = list[object]()
    all_starts = list[Tensor]()
    first = 0
    for mixture, experts in mixtures:
        pieces = [arena.file_extent(each.weights) for expert in experts for each in expert]
        listed = (native_library.MappedByteRange * len(pieces))(
            *(native_library.MappedByteRange(each.address, each.size) for each in pieces)
        )
        starts = torch.tensor([0, *(len(expert) for expert in experts)]).cumsum(0)
        numbers = [each[first:].data_ptr() for each in (pinned, prefetched, uses)]
        struct = native_library.MappedExperts(listed, starts.data_ptr(), *numbers, counts.data_ptr())
        mixture.mapped = ctypes.pointer(struct)
        structs.append(struct)
        lists.append(listed)
        all_starts.append(starts)
        first += len(experts)
    return _ExpertTables(structs, lists, all_starts, pinned, prefetched, uses, counts)


def set_weights_pointer(buffer: RelocatableWeights, weights: Tensor) -> None:
    ctypes.c_void_p.from_address(buffer.pointer_address).value = weights.data_ptr()


def _aligned_bytes(weights: Tensor) -> int:
    return -(-len(weights) // 64) * 64


def disk_read_bytes() -> int:
    try:
        lines = _PROCESS_IO_FILE.read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("read_bytes:")), 0)
