"""Checks that an adapter's numbers are finite. It compares bits, because NumPy has no bfloat16, and does not import
torch."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from quire.engine.checkpoint.safetensors import tensor_places
from quire.engine.errors import AdapterError

_EXPONENTS = {
    "F64": ("<u8", 0x7FF0 << 48),
    "F32": ("<u4", 0x7F80 << 16),
    "F16": ("<u2", 0x7C00),
    "BF16": ("<u2", 0x7F80),
}
"""By type: an integer type of the same size, and the bits of the exponent. All of them are set in an infinite number
and in NaN."""
_PIECE = 2**20
"""How many numbers are checked at once."""


def check_finite(file: Path) -> None:
    """Raise AdapterError, with the tensor's name, if a tensor of a safetensors file has an infinite number, a NaN, or
    another type than a floating-point one."""
    content = np.memmap(file, dtype=np.uint8, mode="r")
    for name, (dtype, begin, end) in tensor_places(file).items():
        if dtype not in _EXPONENTS:
            raise AdapterError(f"{file.name}: {name[:120]}: is stored as {dtype[:20]}, not as floating-point numbers")
        kind, exponent = _EXPONENTS[dtype]
        bits = content[begin:end].view(kind)
        mask = bits.dtype.type(exponent)
        if any((bits[at : at + _PIECE] & mask == mask).any() for at in range(0, len(bits), _PIECE)):
            raise AdapterError(f"{file.name}: {name[:120]}: holds numbers that are infinite or NaN")
