from __future__ import annotations

import ctypes
import mmap
import os
import tempfile
from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from quire.kernels.collective import Collective, RankEnded
from quire.kernels.cpu import native_library

_HEADER_BYTES = 8192
_CLOSED_OFFSET = 8
_MIN_BUFFER_BYTES = 1 << 20
"""Minimum size of a rank's buffer. Longer tensors are summed in pieces."""
_MAX_SPINS = 2000
"""Polls before a waiting rank sleeps: about 50 microseconds, longer than ranks with their own cores lag within a step.
"""


def create_shared_memory(count: int, row_bytes: int) -> int:
    capacity = -(-max(_MIN_BUFFER_BYTES, row_bytes) // 4096) * 4096
    descriptor = os.memfd_create("quire-ranks") if hasattr(os, "memfd_create") else _create_unlinked_file()
    os.ftruncate(descriptor, _HEADER_BYTES + 2 * count * capacity)
    return descriptor


class SharedCollective(Collective):
    def __init__(
        self, library: native_library.NativeLibrary, descriptor: int, rank: int, count: int, parent: int = 0
    ) -> None:
        size = os.fstat(descriptor).st_size
        self._mapped = mmap.mmap(descriptor, size)
        self._memory = torch.frombuffer(self._mapped, dtype=torch.uint8)
        capacity = (size - _HEADER_BYTES) // (2 * count)
        cores = len(os.sched_getaffinity(0))
        spins = _MAX_SPINS if count * torch.get_num_threads() <= cores else 0
        self.rank, self.world_size = rank, count
        self.native = native_library.Collective(self._memory.data_ptr(), capacity, rank, count, parent, spins, 0)
        self._sum = library.sum_ranks
        self._gather = library.gather_ranks
        self._share = library.share_rank
        self.pointer = ctypes.addressof(self.native)

    def all_reduce(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        if self._sum[x.dtype](self.pointer, x.data_ptr(), x.numel(), torch.get_num_threads()):
            raise RankEnded
        return x

    def gather_columns(self, x: Tensor, widths: Sequence[int]) -> Tensor:
        x, rows = x.contiguous(), len(x)
        starts = (ctypes.c_int64 * (self.world_size + 1))(0, *accumulate(widths))
        out = x.new_empty((rows, sum(widths))) if self.rank == 0 else None
        if x.dtype != torch.float32 or x.shape[1] != widths[self.rank]:
            raise TypeError(f"{list(x.shape)} of {x.dtype} is not rank {self.rank}'s part of {widths}")
        if self._gather(self.pointer, x.data_ptr(), None if out is None else out.data_ptr(), rows, starts):
            raise RankEnded
        return x if out is None else out

    def broadcast(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        if self._share(self.pointer, x.data_ptr(), x.nbytes):
            raise RankEnded
        return x

    def abort_collectives(self) -> None:
        self._memory[_CLOSED_OFFSET] = 1


def _create_unlinked_file() -> int:
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
