from __future__ import annotations

import ctypes


class _MallInfo2(ctypes.Structure):
    """glibc's struct mallinfo2."""

    _fields_ = [
        *((f"unused{number}", ctypes.c_size_t) for number in range(4)),
        ("hblkhd", ctypes.c_size_t),
        *((f"unused{number}", ctypes.c_size_t) for number in range(4, 6)),
        ("uordblks", ctypes.c_size_t),
        *((f"unused{number}", ctypes.c_size_t) for number in range(6, 8)),
    ]


def heap_bytes() -> int:
    """Bytes in use in the C heap; 0 if the C library reports none (musl, macOS)."""
    ask = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if ask is None:
        return 0
    ask.restype = _MallInfo2
    info = ask()
    return int(info.uordblks + info.hblkhd)
