"""8-bit keys and values. `torch.int8` has a bfloat16 scale per head and token. `torch.float8_e4m3fn` has no such
scales, but a layer may have one scale for keys and one for values, as calibrated checkpoints do. A token's codes depend
only on the token's own key and value.

A page includes its scales. In the reference and in Triton it has [tokens, K, D] codes, then [tokens, K] scales.
kernels/cpu/kv_codes.h defines the CPU's page.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

QUANTIZED_KV_DTYPES = (torch.int8, torch.float8_e4m3fn)
SCALE_DTYPE = torch.bfloat16
_MAX_INT8 = 127
_MAX_FLOAT8 = 448.0
_MIN_SCALE = 2.0**-126


@dataclass(frozen=True, slots=True)
class KVScales:
    key: float = 1.0
    value: float = 1.0


UNIT_KV_SCALES = KVScales()


def num_scale_elements(kv_dtype: torch.dtype) -> int:
    """Return the elements that a scale (per head and token) takes in the cache."""
    return SCALE_DTYPE.itemsize if kv_dtype == torch.int8 else 0


def quantize_kv(x: Tensor, kv_dtype: torch.dtype, scale: float) -> tuple[Tensor, Tensor | None]:
    """Return codes [..., D], and for int8 bfloat16 scales [...], otherwise None. Ties round to even. Floats
    saturate.
    """
    wide = x.float()
    if kv_dtype != torch.int8:
        return (wide / scale).clamp(-_MAX_FLOAT8, _MAX_FLOAT8).to(kv_dtype), None
    scales = (wide.abs().amax(-1) / _MAX_INT8).clamp(min=_MIN_SCALE).to(SCALE_DTYPE)
    return (wide / scales.float().unsqueeze(-1)).round().to(torch.int8), scales


def dequantize_kv(codes: Tensor, scales: Tensor | None, scale: float, dtype: torch.dtype) -> Tensor:
    """Return numbers [..., D] in `dtype`, which must be wider than codes [..., D]."""
    wide = codes.to(dtype)
    return wide * scale if scales is None else wide * scales.to(dtype).unsqueeze(-1)


def store_quantized_kv(x: Tensor, cache: Tensor, slots: Tensor, scale: float) -> None:
    """x is [T, K, D], slots are [T], and the cache is [pages, tokens, K, D + scale bytes]."""
    tokens, kv_heads = cache.shape[1:3]
    flat = cache.view(torch.uint8).view(len(cache), -1)
    page = slots // tokens
    within = slots % tokens
    codes, scales = quantize_kv(x, cache.dtype, scale)
    width = codes[0].numel()
    _write_page_bytes(flat, page, within * width, codes.contiguous())
    if scales is not None:
        beside = SCALE_DTYPE.itemsize * kv_heads
        _write_page_bytes(flat, page, tokens * width + within * beside, scales.contiguous())


def _write_page_bytes(flat: Tensor, page: Tensor, begin: Tensor, rows: Tensor) -> None:
    """Write rows [T, ...] to pages, each from byte `begin` [T] of its page on."""
    values = rows.view(torch.uint8).flatten(1)
    flat[page[:, None], begin[:, None] + torch.arange(values.shape[1], device=flat.device)] = values


def dequantize_kv_pages(pages: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    """Return [pages * tokens, K, D] in `dtype`, which must be wider than the codes."""
    count, tokens, kv_heads, size = pages.shape
    dim = size - num_scale_elements(pages.dtype)
    flat = pages.reshape(count, -1)
    codes = flat[:, : tokens * kv_heads * dim].reshape(-1, kv_heads, dim)
    if dim == size:
        return dequantize_kv(codes, None, scale, dtype)
    scales = flat[:, tokens * kv_heads * dim :].contiguous().view(SCALE_DTYPE).view(-1, kv_heads)
    return dequantize_kv(codes, scales, scale, dtype)
