"""The product of a single row, as decodes of one sequence have it: its time is reading the weights.

A library's kernels for matrices give a tile of outputs to a block of threads, which for one row are too few blocks to
keep all of a GPU's memory busy, so they split the inner dimension, and add parts up behind a barrier. Here a block has
a few outputs, sums along the whole inner dimension, and there are some thousand of them. With --deterministic rows are
multiplied alike in every batch: kernels/gpu/triton_linear.py.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.backend import Linear, LinearContext
from quire.kernels.gpu.triton_sizes import cdiv

_BLOCK = (4, 512, 4)
"""Outputs, numbers of the inner dimension at a time, and warps."""
_DTYPES = (torch.bfloat16, torch.float16)


@triton.jit
def _row_kernel(
    x, weight, bias, out, outs, inner, BIASED: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr
):  # fmt: skip
    """out [outs] = weight [outs, inner] @ x [inner] + bias. Grid: blocks of outputs."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    there = n < outs
    at = weight + n.to(tl.int64)[:, None] * inner + k[None, :]
    sums = tl.zeros((BLOCK_N, BLOCK_K), dtype=tl.float32)
    for begin in range(0, inner, BLOCK_K):
        inside = begin + k < inner
        mask = there[:, None] & inside[None, :]
        each = tl.load(at + begin, mask=mask, other=0.0, eviction_policy="evict_first")
        sums += each.to(tl.float32) * tl.load(x + begin + k, mask=inside, other=0.0).to(tl.float32)[None, :]
    total = tl.sum(sums, 1)
    if BIASED:
        total += tl.load(bias + n, mask=there, other=0.0).to(tl.float32)
    tl.store(out + n, total.to(out.dtype.element_ty), mask=there)


def multiply_row(x: Tensor, weight: Tensor, bias: Tensor | None, *, wide: bool) -> Tensor:
    """[1, outs] of x [1, inner] and contiguous weights [outs, inner]; `wide`: float32."""
    x = x.contiguous()
    outs, inner = weight.shape
    out = x.new_empty((1, outs), dtype=torch.float32 if wide else x.dtype)
    block_n, block_k, warps = _BLOCK
    _row_kernel[cdiv(outs, block_n),](
        x, weight, weight if bias is None else bias, out, outs, inner, bias is not None, block_n, block_k,
        num_warps=warps,
    )  # fmt: skip
    return out


def beside(many: Linear, weight: Tensor, bias: Tensor | None, *, wide: bool) -> Linear:
    """`many`, of the same weights, but for single rows where this was measured to be faster."""
    if not _is_faster(weight):
        return many

    def linear(x: Tensor, context: LinearContext) -> Tensor:
        return multiply_row(x, weight, bias, wide=wide) if len(x) == 1 else many(x, context)

    return linear


def _is_faster(weight: Tensor) -> bool:
    """Measured on an H100."""
    if weight.device.type != "cuda" or torch.version.hip is not None or weight.dtype not in _DTYPES:
        return False
    return torch.cuda.get_device_capability(weight.device)[0] == 9
