"""Keys and values in 8 bits: what a page of codes holds, and its plain PyTorch.

`torch.int8`: every head of every token has a scale of its own in bfloat16. `torch.float8_e4m3fn`: codes alone; a layer
may have one scale for its keys and one for its values (`KVScales`), as calibrated checkpoints do. Either way a token's
codes depend on nothing but the token's own key and value.

Scales lie in the page, behind its codes, so that whatever happens to a page happens to them. A page of the reference
and of Triton is [tokens, K, D] codes, then [tokens, K] scales; the CPU's is laid out by kernels/cpu/kv_codes.h.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

KV_CODES = (torch.int8, torch.float8_e4m3fn)
"""The types of pages that do not hold the model's own."""
SCALE = torch.bfloat16
_MOST_INTEGER = 127
_MOST_FLOAT8 = 448.0
_LEAST_SCALE = 2.0**-126


@dataclass(frozen=True, slots=True)
class KVScales:
    """What the 8-bit floats in a layer's pages are multiplied by to be its keys and its values."""

    key: float = 1.0
    value: float = 1.0


UNSCALED = KVScales()


def scale_elements(kv_dtype: torch.dtype) -> int:
    """Elements of a page, beside its codes, for each head of each token."""
    return SCALE.itemsize if kv_dtype == torch.int8 else 0


def rounded(x: Tensor, kv_dtype: torch.dtype, scale: float) -> tuple[Tensor, Tensor | None]:
    """Codes [..., D] of x [..., D] in this type, and of integers the scales [...] in bfloat16. Ties go to even; an
    8-bit float that would be too large becomes the largest."""
    wide = x.float()
    if kv_dtype != torch.int8:
        return (wide / scale).clamp(-_MOST_FLOAT8, _MOST_FLOAT8).to(kv_dtype), None
    scales = (wide.abs().amax(-1) / _MOST_INTEGER).clamp(min=_LEAST_SCALE).to(SCALE)
    return (wide / scales.float().unsqueeze(-1)).round().to(torch.int8), scales


def expanded(codes: Tensor, scales: Tensor | None, scale: float, dtype: torch.dtype) -> Tensor:
    """The numbers that codes [..., D] stand for, in a wider type."""
    wide = codes.to(dtype)
    return wide * scale if scales is None else wide * scales.to(dtype).unsqueeze(-1)


def store_codes(x: Tensor, cache: Tensor, slots: Tensor, scale: float) -> None:
    """Write x [T, K, D] to the slots [T] of a cache of codes [pages, tokens, K, D and bytes of a scale]."""
    tokens, kv_heads = cache.shape[1:3]
    flat, page, within = cache.view(torch.uint8).view(len(cache), -1), slots // tokens, slots % tokens
    codes, scales = rounded(x, cache.dtype, scale)
    width = codes[0].numel()
    _put(flat, page, within * width, codes.contiguous())
    if scales is not None:
        beside = SCALE.itemsize * kv_heads
        _put(flat, page, tokens * width + within * beside, scales.contiguous())


def _put(flat: Tensor, page: Tensor, begin: Tensor, rows: Tensor) -> None:
    """Write rows [T, ...] to bytes `begin` [T] of their pages."""
    values = rows.view(torch.uint8).flatten(1)
    flat[page[:, None], begin[:, None] + torch.arange(values.shape[1], device=flat.device)] = values


def load_codes(pages: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    """Keys or values [pages * tokens, K, D] of pages of codes, in a wider type."""
    count, tokens, kv_heads, size = pages.shape
    dim = size - scale_elements(pages.dtype)
    flat = pages.reshape(count, -1)
    codes = flat[:, : tokens * kv_heads * dim].reshape(-1, kv_heads, dim)
    if dim == size:
        return expanded(codes, None, scale, dtype)
    scales = flat[:, tokens * kv_heads * dim :].contiguous().view(SCALE).view(-1, kv_heads)
    return expanded(codes, scales, scale, dtype)
