"""The formats of kv_quantization.py for Triton kernels. HELD tells what pages hold: 0 for the model's dtype, 1 for
int8, 2 for float8. Bit operations convert float8, because GPUs before compute capability 8.9 lack the instruction.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.kv_quantization import SCALE_DTYPE

_KV_FORMATS = {torch.int8: 1, torch.float8_e4m3fn: 2}


def cache_format_and_views(cache: Tensor) -> tuple[int, Tensor, Tensor]:
    """Return HELD, the cache for kernels, and the int8 scales as a bfloat16 view of its memory, or the cache again if
    it is not int8.
    """
    kv_format = _KV_FORMATS.get(cache.dtype, 0)
    if kv_format == 1:
        return kv_format, cache, cache.view(SCALE_DTYPE)
    codes = cache.view(torch.uint8) if kv_format else cache  # not every GPU's compiler supports float8
    return kv_format, codes, codes


@triton.jit
def integer_scale(most):
    """`most` is the largest magnitude in a head."""
    return tl.maximum(tl.div_rn(most, 127.0), 1.1754943508222875e-38).to(tl.bfloat16)


@triton.jit
def to_integer(x, scale):
    """Ties round to even. The rounding works because a float32 above 2^23 has no bits for a fraction."""
    return ((tl.div_rn(x, scale) + 12582912.0) - 12582912.0).to(tl.int8)


@triton.jit
def to_float8(x):
    """Ties round to even, and values saturate at 448."""
    bits = x.to(tl.uint32, bitcast=True)
    sign = (bits >> 24) & 0x80
    size = tl.minimum(bits & 0x7FFFFFFF, 0x43E00000)
    rounded = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - 960
    small = (size.to(tl.float32, bitcast=True) + 16384.0).to(tl.uint32, bitcast=True) & 15  # multiples of 2^-9
    return (sign | tl.where(size < 0x3C800000, small, rounded)).to(tl.uint8)


@triton.jit
def from_float8(codes):
    """NaN becomes 480."""
    bits = codes.to(tl.uint32)
    bits = ((bits & 0x7F) << 20) | ((bits & 0x80) << 24)  # the exponent is 120 too small
    return bits.to(tl.float32, bitcast=True) * 1.329227995784916e36


@triton.jit
def kv_codes_to_unscaled_floats(codes, HELD: tl.constexpr, like):
    """`like`'s dtype represents the codes exactly."""
    if HELD == 1:
        return codes.to(tl.float32).to(like.dtype)
    elif HELD == 2:
        return from_float8(codes).to(like.dtype)
    else:
        return codes
