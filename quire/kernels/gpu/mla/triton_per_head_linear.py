"""The linear of mla/per_head_linear.py in Triton, with all heads in one launch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.attention_params import AttentionParams
from quire.kernels.backend import AttentionMetadata, Linear, LinearContext
from quire.kernels.gpu.mla.expanded_attention import run_expanded_attention
from quire.kernels.gpu.triton_launch_sizes import cdiv
from quire.kernels.kv_quantization import QUANTIZED_KV_DTYPES

_FIXED_TILE_ROWS, _MAX_DECODE_ROWS = 64, 16
_OUTPUTS_PER_TILE, _INNER_STEP = 64, 64
_MIN_EXPANDED_TOKENS = 16
"""Minimum tokens of the longest prompt. Expanding never multiplies more than absorbing, but launches more kernels."""


@triton.jit(do_not_specialize=["rows"])
def multiply_per_head(
    x, weight, out, rows, BLOCKS: tl.constexpr, OUTS: tl.constexpr, INNER: tl.constexpr, PASSED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Each output is a single sum over INNER, in order."""
    m, block = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M), tl.program_id(2)
    m_inside, k = m < rows, tl.arange(0, BLOCK_K)
    own_x = x + (m.to(tl.int64)[:, None] * BLOCKS + block) * (INNER + PASSED)
    own_out = out + (m.to(tl.int64)[:, None] * BLOCKS + block) * (OUTS + PASSED)
    TILES: tl.constexpr = (OUTS + BLOCK_N - 1) // BLOCK_N
    if tl.program_id(1) >= TILES:
        i = (tl.program_id(1) - TILES) * BLOCK_N + tl.arange(0, BLOCK_N)
        inside = m_inside[:, None] & (i < PASSED)[None, :]
        tl.store(own_out + OUTS + i[None, :], tl.load(own_x + INNER + i[None, :], mask=inside, other=0.0), mask=inside)
    else:
        n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
        lines = weight + (block * OUTS + n).to(tl.int64)[None, :] * INNER
        total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for begin in range(0, INNER, BLOCK_K):
            k_inside = begin + k < INNER
            left = tl.load(own_x + begin + k[None, :], mask=m_inside[:, None] & k_inside[None, :], other=0.0)
            right = tl.load(lines + begin + k[:, None], mask=(n < OUTS)[None, :] & k_inside[:, None], other=0.0)
            total = tl.dot(left, right, total, input_precision="ieee")
        inside = m_inside[:, None] & (n < OUTS)[None, :]
        tl.store(own_out + n[None, :], total.to(out.dtype.element_ty), mask=inside)


class TritonPerHeadLinear:
    def __init__(self, weights: Sequence[Tensor], passthrough_dim: int, *, fixed: bool) -> None:
        self.weight = torch.stack(list(weights)).contiguous()
        """[B, out, in]"""
        self._passthrough_dim, self._fixed = passthrough_dim, fixed

    def should_expand(self, cache: Tensor, metadata: AttentionMetadata) -> bool:
        whole = metadata.is_full_prefill and metadata.max_query_len >= _MIN_EXPANDED_TOKENS
        return whole and not self._fixed and cache.dtype not in QUANTIZED_KV_DTYPES

    def attend_expanded(
        self, q: Tensor, expand: Linear, cache: Tensor, metadata: AttentionMetadata, softmax: AttentionParams
    ) -> Tensor:
        assert isinstance(expand, TritonPerHeadLinear)
        return run_expanded_attention(q, (self.weight, expand.weight), cache, metadata, softmax)

    def __call__(self, x: Tensor, context: LinearContext) -> Tensor:
        x = x.contiguous()
        (blocks, outs, inner) = self.weight.shape
        passthrough_dim = self._passthrough_dim
        rows = len(x)
        out = x.new_empty((rows, blocks * (outs + passthrough_dim)))
        if not rows:
            return out
        few = not self._fixed and rows <= _MAX_DECODE_ROWS
        block_m = _MAX_DECODE_ROWS if few else _FIXED_TILE_ROWS
        grid = (cdiv(rows, block_m), cdiv(outs, _OUTPUTS_PER_TILE) + cdiv(passthrough_dim, _OUTPUTS_PER_TILE), blocks)
        sizes = (blocks, outs, inner, passthrough_dim, block_m, _OUTPUTS_PER_TILE, _INNER_STEP)
        multiply_per_head[grid](x, self.weight, out, rows, *sizes, num_warps=4, num_stages=3)
        return out
