"""PTX that decodes low-bit codes two at a time, while Triton's operations take one. Bits of codes become bits of
floats, from which one multiply-add makes exact numbers.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton import knobs

HAS_PTX = tl.constexpr(not knobs.runtime.interpret and torch.version.hip is None)

_ONE_BITS = {True: 0x3F80, False: 0x3C00}
"""1.0 as bfloat16 (True) and float16."""
_MAGIC_BITS = {True: 0x4300, False: 0x6400}
"""128 in bfloat16, 1024 in float16. Their last bit counts 1, so OR-ing a small integer adds it."""


def _paired_half_literal(half: int) -> str:
    return f"0x{half:04X}{half:04X}"


def _shift_asm(to: str, source: str, left: int) -> str:
    if left == 0:
        return f"mov.b32 {to}, {source};"
    return f"shl.b32 {to}, {source}, {left};" if left > 0 else f"shr.u32 {to}, {source}, {-left};"


def _multiply_add_asm(to: str, wide: bool, factor: int, added: str) -> str:
    """Return PTX for t * factor + added on the two 16-bit numbers in t. `added` is literal bits or a register."""
    kind = "bf16x2" if wide else "f16x2"
    return f"mov.b32 o, {_paired_half_literal(factor)}; mov.b32 m, {added}; fma.rn.{kind} {to}, t, o, m;"


def _float_decode_asm(to: str, source: str, wide: bool, at: int, bits: int, mantissa: int, exponent: int) -> str:
    """Return PTX for the float at bit `at` of each half of the source. Its value is 2^exponent times that of its bits
    in the larger type.
    """
    fraction = 7 if wide else 10
    sign, rest = at + bits - 1, _paired_half_literal(((1 << (bits - 1)) - 1) << (fraction - mantissa))
    factor = (127 + exponent) << 7 if wide else (15 + exponent) << 10
    return (
        _shift_asm("t", source, 15 - sign)
        + "and.b32 t, t, 0x80008000;"
        + _shift_asm("u", source, fraction - mantissa - at)
        + f"lop3.b32 t, u, {rest}, t, 0xEA;"
        + _multiply_add_asm(to, wide, factor, "0x80008000")
    )


def _nibble_decode_asm(floats: bool, wide: bool, part: int) -> str:
    """Return PTX that decodes the part-th nibble of both 16-bit words in $1, to integers minus 8, or doubled floats
    (e2m1).
    """
    if floats:
        # To double the floats, do not subtract e2m1's exponent bias of 1
        body = _float_decode_asm("$0", "$1", wide, 4 * part, 4, 1, 127 if wide else 15)
    else:
        magic = _MAGIC_BITS[wide]
        body = _shift_asm("t", "$1", -4 * part) + f"lop3.b32 t, t, 0x000F000F, {_paired_half_literal(magic)}, 0xEA;"
        body += _multiply_add_asm("$0", wide, _ONE_BITS[wide], _paired_half_literal(0x8000 | magic | 8))
    return "{.reg .b32 t, u, o, m;" + body + "}"


def _byte_decode_asm(floats: bool, wide: bool, part: int) -> str:
    """Return PTX that decodes the part-th byte of both 16-bit words in $1, from float8 (e4m3) or integers."""
    magic = _MAGIC_BITS[wide]
    if floats:
        body = _float_decode_asm("$0", "$1", wide, 8 * part, 8, 3, 120 if wide else 8)
    elif wide:  # bfloat16 has only 7 fraction bits, so the sign bit instead changes the subtrahend from 128 to 256
        body = _shift_asm("t", "$1", -8 * part)
        body += f"lop3.b32 u, t, 0x00800080, {_paired_half_literal(0x8000 | magic)}, 0xEA;"
        body += f"lop3.b32 t, t, 0x007F007F, {_paired_half_literal(magic)}, 0xEA;" + _multiply_add_asm(
            "$0", wide, _ONE_BITS[wide], "u"
        )
    else:
        body = "xor.b32 u, $1, 0x80808080;" + _shift_asm("t", "u", -8 * part)
        body += f"lop3.b32 t, t, 0x00FF00FF, {_paired_half_literal(magic)}, 0xEA;"
        body += _multiply_add_asm("$0", wide, _ONE_BITS[wide], _paired_half_literal(0x8000 | magic | 128))
    return "{.reg .b32 t, u, o, m;" + body + "}"


_BOOLEANS = (False, True)
_NIBBLE_DECODE_ASM = tl.constexpr(
    tuple(_nibble_decode_asm(floats, wide, part) for floats in _BOOLEANS for wide in _BOOLEANS for part in range(4))
)
_BYTE_DECODE_ASM = tl.constexpr(
    tuple(_byte_decode_asm(floats, wide, part) for floats in _BOOLEANS for wide in _BOOLEANS for part in range(2))
)


@triton.constexpr_function
def nibble_decode_asm(floats: bool, wide: bool, part: int) -> str:
    """Kernels can read only precomputed text."""
    return _NIBBLE_DECODE_ASM.value[8 * floats + 4 * wide + part]


@triton.constexpr_function
def byte_decode_asm(floats: bool, wide: bool, part: int) -> str:
    return _BYTE_DECODE_ASM.value[4 * floats + 2 * wide + part]
