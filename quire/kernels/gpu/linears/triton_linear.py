"""Batch-invariant matrix products for --deterministic. Libraries choose tiles and splits by the number of rows, so a
row's bits depend on the batch (He and Thinking Machines, "Defeating Nondeterminism in LLM Inference", 2025). Here each
weight has one tiling and no splits, which is slower.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.backend import Linear, LinearContext
from quire.kernels.gpu.triton_launch_sizes import cdiv

_ROWS_PER_TILE = 64
_INNER_STEP = 64
_MIN_WIDE_OUTPUTS = 8192
"""From this many outputs on, tiles are twice as wide, because there are still enough to fill the GPU."""


@triton.jit(do_not_specialize=["rows"])
def _linear_kernel(
    x, weight, bias, out, rows, outs, inner,
    BIASED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Tiles that read the same weights are neighbors in the grid, so that they share the cache."""
    tiles_m = tl.cdiv(rows, BLOCK_M)
    m = (tl.program_id(0) % tiles_m) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = (tl.program_id(0) // tiles_m) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    m_inside, n_inside = m < rows, n < outs
    m_wide, n_wide = m.to(tl.int64), n.to(tl.int64)
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for begin in range(0, inner, BLOCK_K):
        k_inside = begin + k < inner
        left = tl.load(
            x + m_wide[:, None] * inner + begin + k[None, :], mask=m_inside[:, None] & k_inside[None, :], other=0.0
        )
        right = tl.load(
            weight + n_wide[None, :] * inner + begin + k[:, None], mask=n_inside[None, :] & k_inside[:, None], other=0.0
        )
        total = tl.dot(left, right, total, input_precision="ieee")
    if BIASED:
        total += tl.load(bias + n, mask=n_inside, other=0.0).to(tl.float32)[None, :]
    tl.store(
        out + m_wide[:, None] * outs + n_wide[None, :],
        total.to(out.dtype.element_ty),
        mask=m_inside[:, None] & n_inside[None, :],
    )


@dataclass(frozen=True, slots=True)
class DenseLinear:
    """A linear whose unquantized weight the MoE kernel can read."""

    weight: Tensor
    """[outs, inner], contiguous."""
    bias: Tensor | None
    has_float32_output: bool
    multiply: Linear

    @property
    def offloadable_tensors(self) -> tuple[Tensor, ...]:
        return (self.weight,)

    def __call__(self, x: Tensor, context: LinearContext) -> Tensor:
        return self.multiply(x, context)


def pack_linear(weight: Tensor, bias: Tensor | None, *, wide: bool = False) -> Linear:
    weight = weight.contiguous()
    outs, inner = weight.shape
    block_n = 128 if outs >= _MIN_WIDE_OUTPUTS else 64

    def linear(x: Tensor, context: LinearContext) -> Tensor:
        x = x.contiguous()
        rows = x.shape[0]
        out = x.new_empty((rows, outs), dtype=torch.float32 if wide else x.dtype)
        if rows:
            grid = (cdiv(rows, _ROWS_PER_TILE) * cdiv(outs, block_n),)
            _linear_kernel[grid](
                x, weight, weight if bias is None else bias, out, rows, outs, inner, bias is not None,
                _ROWS_PER_TILE, block_n, _INNER_STEP, num_warps=4, num_stages=3,
            )  # fmt: skip
        return out

    return linear
