"""Keys and values in 8 bits, for Triton's kernels: numbers to codes and back, as kernels/kv_quantization.py computes
them.

8-bit floats are made of bits, not by a conversion, which GPUs before compute capability 8.9 lack. HELD: what pages
hold; 0 the model's type, 1 integers, 2 8-bit floats.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.kv_quantization import SCALE_DTYPE

_KV_FORMATS = {torch.int8: 1, torch.float8_e4m3fn: 2}


def cache_format_and_views(cache: Tensor) -> tuple[int, Tensor, Tensor]:
    """HELD, the cache as kernels take it, and where integers' scales are: the same memory as bfloat16. What has no
    scales gives itself."""
    kv_format = _KV_FORMATS.get(cache.dtype, 0)
    if kv_format == 1:
        return kv_format, cache, cache.view(SCALE_DTYPE)
    codes = cache.view(torch.uint8) if kv_format else cache  # not all GPUs' compilers know the type
    return kv_format, codes, codes


@triton.jit
def integer_scale(most):
    """The scale of a head whose largest absolute number is `most`, in bfloat16."""
    return tl.maximum(tl.div_rn(most, 127.0), 1.1754943508222875e-38).to(tl.bfloat16)


@triton.jit
def to_integer(x, scale):
    """The nearest integer, ties to even: adding 1.5 * 2^23 leaves no room for a fraction."""
    return ((tl.div_rn(x, scale) + 12582912.0) - 12582912.0).to(tl.int8)


@triton.jit
def to_float8(x):
    """The bits of the nearest 8-bit float, ties to even; what is too large becomes 448."""
    bits = x.to(tl.uint32, bitcast=True)
    sign = (bits >> 24) & 0x80
    size = tl.minimum(bits & 0x7FFFFFFF, 0x43E00000)
    rounded = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - 960
    small = (size.to(tl.float32, bitcast=True) + 16384.0).to(tl.uint32, bitcast=True) & 15  # multiples of 2^-9
    return (sign | tl.where(size < 0x3C800000, small, rounded)).to(tl.uint8)


@triton.jit
def from_float8(codes):
    """The numbers of an 8-bit float's bits, in float32; those that are none become 480."""
    bits = codes.to(tl.uint32)
    bits = ((bits & 0x7F) << 20) | ((bits & 0x80) << 24)  # an exponent that is 120 too small
    return bits.to(tl.float32, bitcast=True) * 1.329227995784916e36


@triton.jit
def kv_codes_to_unscaled_floats(codes, HELD: tl.constexpr, like):
    """Codes in the type of `like`, which holds them exactly."""
    if HELD == 1:
        return codes.to(tl.float32).to(like.dtype)
    elif HELD == 2:
        return from_float8(codes).to(like.dtype)
    else:
        return codes
