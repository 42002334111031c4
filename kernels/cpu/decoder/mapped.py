"""Weights in a file (MappedArena), and experts there: it is mapped into memory, so that the system reads what is
multiplied, and lets go of it when memory is short; the most used ones are copied into memory that it cannot let go.
Results have the bits that they have where all is in memory: the same kernels read the same bytes. Layers of dense
models in such a file: from_disk.py."""

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

from quire.kernels.cpu import native
from quire.kernels.experts import ExpertsOnDisk
from quire.kernels.streaming.offload import OffloadCounts

_CHUNK = 64 << 20
"""Bytes that are mapped at a time, and at most wait to be written while weights are loaded."""
_MOST_MOVED = 64 << 20
"""Bytes that are copied then, at most."""
_BETTER = 1.25
"""An expert takes another's place in memory where it is so many times as much used."""
_IO = Path("/proc/self/io")
_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class Held(NamedTuple):
    """Packed weights that a kernel reads."""

    pointer: int
    """Where the address of the weights stands."""
    weights: Tensor
    """[bytes] uint8."""


class Reopened:
    """A file that is open another time, to be read past the system's cache if its file system lets it."""

    def __init__(self, descriptor: int) -> None:
        """descriptor: of the first time; the file need not have a name."""
        again, flags = f"/proc/self/fd/{descriptor}", os.O_RDONLY | os.O_CLOEXEC
        try:
            self.number, self.direct = os.open(again, flags | os.O_DIRECT), True
        except OSError:
            self.number, self.direct = os.open(again, flags), False

    def __del__(self) -> None:
        os.close(self.number)


class _Piece(NamedTuple):
    begin: int
    """Address, at the beginning of a page of memory."""
    offset: int
    """In the file."""
    size: int
    """Bytes."""


class MappedArena(native.Arena):
    """Memory for weights in a file without a name, which is gone with the process, however that ends."""

    def __init__(self, folder: Path) -> None:
        """Raises OSError where no file can be made there."""
        super().__init__()
        self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115
        self._size = 0
        self._chunks: list[tuple[mmap.mmap, int]] = []  # each with its offset in the file
        self._pieces: dict[int, _Piece] = {}
        self.mixtures: list[tuple[native.Experts, Sequence[Sequence[Held]]]] = []
        """In the order of the layers; of each expert what it holds."""

    def empty(self, size: int) -> Tensor:
        """[size] uint8, on pages of its own. Raises OSError where the disk is full."""
        rounded = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
        if rounded > len(self._free):
            self._map(max(_CHUNK, rounded))
        piece = self._free[:size]
        offset = self._size - mmap.PAGESIZE - len(self._free)
        self._pieces[piece.data_ptr()] = _Piece(piece.data_ptr(), offset, rounded)
        self._free = self._free[rounded:]
        return piece

    def _map(self, size: int) -> None:
        """The last page of a chunk is for what kernels read ahead. Its bytes are allocated: a hole in a file that a
        full disk cannot fill would end the process."""
        self._out_of_memory(self._chunks[-1:])  # what was packed
        descriptor, whole = self._file.fileno(), size + mmap.PAGESIZE
        os.posix_fallocate(descriptor, self._size, whole)
        chunk = mmap.mmap(descriptor, whole, flags=mmap.MAP_SHARED, offset=self._size)
        self._chunks.append((chunk, self._size))
        self._size += whole
        self._free = torch.frombuffer(chunk, dtype=torch.uint8)[:size]

    def _out_of_memory(self, chunks: Sequence[tuple[mmap.mmap, int]]) -> None:
        """To the disk, if it is not there already."""
        for chunk, offset in chunks:
            chunk.flush()
            chunk.madvise(mmap.MADV_DONTNEED)
            os.posix_fadvise(self._file.fileno(), offset, len(chunk), os.POSIX_FADV_DONTNEED)

    def settle(self) -> None:
        """All is on the disk, and nothing of it in memory."""
        self._out_of_memory(self._chunks)

    def reopened(self) -> Reopened:
        return Reopened(self._file.fileno())

    def piece(self, weights: Tensor) -> _Piece:
        return self._pieces[weights.data_ptr()]

    def fetch(self, weights: Tensor) -> None:
        """Have the system read them, without waiting."""
        piece = self.piece(weights)
        _LIBC.madvise(piece.begin, piece.size, mmap.MADV_WILLNEED)

    def let_go(self, weights: Tensor) -> None:
        """They are not read here any more."""
        piece = self.piece(weights)
        _LIBC.madvise(piece.begin, piece.size, mmap.MADV_DONTNEED)
        os.posix_fadvise(self._file.fileno(), piece.offset, piece.size, os.POSIX_FADV_DONTNEED)


@dataclass(frozen=True, slots=True)
class _Noted:
    """What mapped.h reads and writes: of all experts, layer by layer."""

    structs: Sequence[native.MappedExperts]
    pieces: Sequence[object]
    starts: Sequence[Tensor]
    kept: Tensor  # [experts] uint8
    guessed: Tensor  # [experts] uint8
    uses: Tensor  # [experts] int64
    counts: Tensor  # [4] int64


class MappedExperts(ExpertsOnDisk):
    def __init__(self, arena: MappedArena, memory: int) -> None:
        """memory: bytes for the most used experts. `backend` is set by who makes it, for it packs into the arena."""
        self._arena, self._memory = arena, memory
        self.every = 32
        """Steps after which it is looked at which experts are the most used."""
        self._steps = self._read_before = 0

    def settle(self) -> None:
        self._arena.settle()
        mixtures = self._arena.mixtures
        if not mixtures:
            raise ValueError("the compiled kernels do not compute this model's experts here; use another --dtype")
        self._experts = [expert for _, experts in mixtures for expert in experts]
        self._noted = _note(self._arena)
        self.guess(on=True)
        places = torch.cat([torch.arange(len(experts)) for _, experts in mixtures])
        self._order = places.argsort(stable=True)  # the first of all layers, then the second
        self._scores = torch.zeros(len(self._experts))
        self._keep_first()
        self._read_before = read_bytes()

    def _keep_first(self) -> None:
        """Before anything is known of their use: as many of each layer."""
        self._slot_bytes = max(sum(_rounded(held.weights) for held in expert) for expert in self._experts)
        slots = min(self._memory // self._slot_bytes, len(self._experts))
        if self._memory and not slots:
            raise ValueError(f"an expert takes {self._slot_bytes:,} bytes, more than are to be in memory")
        self._slots = native.Arena().empty(slots * self._slot_bytes)
        self._slot_of: dict[int, int] = {}
        for slot, expert in enumerate(self._order[:slots].tolist()):
            self._keep(expert, slot)

    @property
    def size(self) -> int:
        """Bytes of all experts."""
        return sum(len(held.weights) for expert in self._experts for held in expert)

    @property
    def saved(self) -> int:
        return self.size - len(self._slots)

    @property
    def said(self) -> str:
        kept = (
            f"{len(self._slot_of):,} of {len(self._experts):,} are kept in memory ({len(self._slots) / 2**30:.2f} GiB)"
        )
        return f"experts: {self.size / 2**30:.2f} GiB in a file on disk; {kept}, the others while the system has room"

    def forget(self) -> None:
        """The system keeps nothing of the file in memory, as where it has no room: for measurements."""
        self._arena.settle()

    def guess(self, on: bool) -> None:
        """Whether the next layer's experts are asked for before they are chosen: for measurements."""
        following = [*(ctypes.addressof(each) for each, _ in self._arena.mixtures[1:]), None]
        for noted, mixture in zip(self._noted.structs, following, strict=True):
            noted.next = mixture if on else None

    def step(self) -> None:
        self._steps += 1
        if self._steps % self.every == 0 and 0 < len(self._slot_of) < len(self._experts):
            self._renew()

    def _renew(self) -> None:
        """Put the most used experts in the place of the least used ones. Older uses count half, again and again."""
        self._scores = self._scores / 2 + self._noted.uses
        self._noted.uses.zero_()
        wanted = self._order[self._scores[self._order].argsort(descending=True, stable=True)].tolist()
        better = [expert for expert in wanted[: len(self._slot_of)] if expert not in self._slot_of]
        worst = [expert for expert in reversed(wanted) if expert in self._slot_of]
        scores = self._scores.tolist()
        for new, old in zip(better[: max(_MOST_MOVED // self._slot_bytes, 1)], worst, strict=False):
            if scores[new] <= scores[old] * _BETTER:
                break
            self._keep(new, self._drop(old))

    def _keep(self, expert: int, slot: int) -> None:
        for held in self._experts[expert]:
            self._arena.fetch(held.weights)
        begin = slot * self._slot_bytes
        for held in self._experts[expert]:
            copy = self._slots[begin : begin + len(held.weights)]
            copy.copy_(held.weights)
            point(held, copy)
            self._arena.let_go(held.weights)
            begin += _rounded(held.weights)
        self._slot_of[expert], self._noted.kept[expert] = slot, 1

    def _drop(self, expert: int) -> int:
        """The slot that it had."""
        for held in self._experts[expert]:
            point(held, held.weights)
        self._noted.kept[expert] = 0
        return self._slot_of.pop(expert)

    def counts(self) -> OffloadCounts:
        read, kept, guessed, right = self._noted.counts.tolist()
        return OffloadCounts(read, kept, guessed, right, read_bytes() - self._read_before)


def _note(arena: MappedArena) -> _Noted:
    mixtures = arena.mixtures
    total = sum(len(experts) for _, experts in mixtures)
    kept, guessed = torch.zeros(total, dtype=torch.uint8), torch.zeros(total, dtype=torch.uint8)
    uses, counts = torch.zeros(total, dtype=torch.int64), torch.zeros(4, dtype=torch.int64)
    structs, lists, all_starts, first = list[native.MappedExperts](), list[object](), list[Tensor](), 0
    for mixture, experts in mixtures:
        pieces = [arena.piece(each.weights) for expert in experts for each in expert]
        listed = (native.MappedPiece * len(pieces))(*(native.MappedPiece(each.begin, each.size) for each in pieces))
        starts = torch.tensor([0, *(len(expert) for expert in experts)]).cumsum(0)
        numbers = [each[first:].data_ptr() for each in (kept, guessed, uses)]
        made = native.MappedExperts(listed, starts.data_ptr(), *numbers, counts.data_ptr())
        mixture.mapped = ctypes.pointer(made)
        structs.append(made)
        lists.append(listed)
        all_starts.append(starts)
        first += len(experts)
    return _Noted(structs, lists, all_starts, kept, guessed, uses, counts)


def point(held: Held, weights: Tensor) -> None:
    ctypes.c_void_p.from_address(held.pointer).value = weights.data_ptr()


def _rounded(weights: Tensor) -> int:
    return -(-len(weights) // 64) * 64


def read_bytes() -> int:
    """What this process has had read from disks, page faults and pages asked for included."""
    try:
        lines = _IO.read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("read_bytes:")), 0)
