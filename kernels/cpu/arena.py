"""Memory for weights, on huge pages where the system has them: with 4 KB pages, walking page tables costs up to a third
of the speed at which weights stream through."""

from __future__ import annotations

import mmap

import torch
from torch import Tensor

_HUGE = 2 << 20
_CHUNK = 32 << 20


class Arena:
    """Hands out pieces of large mappings, which live as long as a piece does."""

    def __init__(self) -> None:
        self._free = torch.empty(0, dtype=torch.uint8)

    def empty(self, size: int) -> Tensor:
        """[size] uint8, aligned to 64 bytes, not filled."""
        rounded = -(-size // 64) * 64
        if rounded > len(self._free):
            self._free = _map(max(_CHUNK, -(-rounded // _HUGE) * _HUGE))
        piece, self._free = self._free[:size], self._free[rounded:]
        return piece


def _map(size: int) -> Tensor:
    memory = mmap.mmap(-1, size + _HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    begin = -whole.data_ptr() % _HUGE
    return whole[begin : begin + size]
