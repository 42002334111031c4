"""How much memory C libraries have taken."""

from __future__ import annotations

import ctypes
from functools import cache


class _Info(ctypes.Structure):
    """glibc's struct mallinfo2."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "keep",
        )
    ]


@cache
def _ask() -> ctypes._CFunctionType | None:
    ask = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if ask is not None:
        ask.restype = _Info
    return ask


def heap_bytes() -> int:
    """Bytes that malloc has given out to this process; 0 where the C library does not tell, as musl and macOS."""
    ask = _ask()
    if ask is None:
        return 0
    info = ask()
    return int(info.uordblks + info.hblkhd)
