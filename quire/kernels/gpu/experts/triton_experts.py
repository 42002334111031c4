"""MoE kernels for CUDA graphs: the host reads nothing. Without atomics, every sum has one order.

Row t * top_k + j is token t with its j-th expert. Sorted rows of expert e are starts[e] to starts[e + 1].
"""

from __future__ import annotations

import triton
import triton.language as tl

from quire.kernels.gpu.quantization.triton_quantized import accumulate_output_tile, weight_row_pointers

CODES, SCALES, OFFSETS, FACTORS, BIASES = range(5)
"""Rows of the address table."""


@triton.jit
def choose_experts(
    scores, correction, chosen, shares, added, scale,
    EXPERTS: tl.constexpr, EXPERTS_PAD: tl.constexpr, PER_TOKEN: tl.constexpr, PER_TOKEN_PAD: tl.constexpr,
    SIGMOID: tl.constexpr, NORMALIZED: tl.constexpr, CORRECTED: tl.constexpr,
):  # fmt: skip
    """Choose experts without groups. chosen is int64, best first. shares, the experts' weights, are float32."""
    token, i = tl.program_id(0).to(tl.int64), tl.arange(0, EXPERTS_PAD)
    inside = i < EXPERTS
    score = tl.load(scores + token * EXPERTS + i, mask=inside, other=float("-inf")).to(tl.float32)
    if SIGMOID:
        weight = 1.0 / (1.0 + tl.exp(-score))
    else:
        weight = tl.exp(score - tl.max(score, 0))
        weight = weight / tl.sum(weight, 0)
    wanted = score
    if CORRECTED:
        wanted = weight + tl.load(correction + i, mask=inside, other=0.0).to(tl.float32)
    # rank has integers in the numbers' order: NaN highest, chosen and missing experts lowest.
    bits = (wanted + 0.0).to(tl.int32, bitcast=True)
    rank = tl.where(wanted == wanted, bits ^ ((bits >> 31) & 0x7FFFFFFF), 0x7FFFFFFF)
    rank = tl.where(inside, rank, -0x80000000)
    j = tl.arange(0, PER_TOKEN_PAD)
    best_experts, parts = tl.zeros((PER_TOKEN_PAD,), dtype=tl.int32), tl.zeros((PER_TOKEN_PAD,), dtype=tl.float32)
    for choice in range(PER_TOKEN):
        best = tl.argmax(rank, 0)
        part = tl.sum(tl.where(i == best, weight, 0.0), 0)
        best_experts, parts = tl.where(j == choice, best, best_experts), tl.where(j == choice, part, parts)
        rank = tl.where(i == best, -0x80000000, rank)
    if NORMALIZED:
        parts = parts / (tl.sum(parts, 0) + added)
    tl.store(chosen + token * PER_TOKEN + j, best_experts.to(tl.int64), mask=j < PER_TOKEN)
    tl.store(shares + token * PER_TOKEN + j, parts * scale, mask=j < PER_TOKEN)


@triton.jit(do_not_specialize=["rows", "first"])
def sort_rows(chosen, order, starts, rows, first, EXPERTS: tl.constexpr, BLOCK: tl.constexpr):
    """Sort rows by expert, stably. This rank has EXPERTS experts from `first` on. order is int32."""
    expert, i = tl.program_id(0), tl.arange(0, BLOCK)
    before = expert * 0
    for begin in range(0, rows, BLOCK):
        local_expert = tl.load(chosen + begin + i, mask=begin + i < rows, other=-1) - first
        before += tl.sum(((local_expert >= 0) & (local_expert < expert)).to(tl.int32), 0)
    tl.store(starts + expert, before)
    for begin in range(0, rows, BLOCK):
        mine = (tl.load(chosen + begin + i, mask=begin + i < rows, other=-1) - first == expert).to(tl.int32)
        tl.store(order + before + tl.cumsum(mine, 0) - 1, begin + i, mask=mine > 0)
        before += tl.sum(mine, 0)
    if expert == EXPERTS - 1:
        tl.store(starts + EXPERTS, before)


@triton.jit
def _locate_expert_tile(starts, tile, EXPERTS: tl.constexpr, EXPERTS_PAD: tl.constexpr, BLOCK_M: tl.constexpr):
    """Return (expert, first row of the tile, end of the expert's rows). Tiles after the last have expert EXPERTS."""
    expert = tl.arange(0, EXPERTS_PAD)
    real = expert < EXPERTS
    first = tl.load(starts + expert, mask=real, other=0)
    last = tl.load(starts + expert + 1, mask=real, other=0)
    tiles = tl.cdiv(last - first, BLOCK_M)
    ends = tl.cumsum(tiles, 0)
    own = tl.sum((real & (ends <= tile)).to(tl.int32), 0)
    here = expert == own
    begin = tl.sum(tl.where(here, first + (tile - ends + tiles) * BLOCK_M, 0), 0)
    return own, begin, tl.sum(tl.where(here, last, 0), 0)


@triton.jit
def _expert_tensor_pointer(table, kind: tl.constexpr, expert, like, EXPERTS: tl.constexpr):
    return tl.multiple_of(tl.load(table + kind * EXPERTS + expert).to(like.dtype), 16)


@triton.jit(do_not_specialize=["rows", "tiles"])
def multiply_experts(
    x, out, order, starts, table, codes, scales, factors, bias, rows, tiles, outs, inner, stride, group,
    PER_TOKEN: tl.constexpr, OF_TOKENS: tl.constexpr, EXPERTS: tl.constexpr, EXPERTS_PAD: tl.constexpr,
    KIND: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr, SCALED: tl.constexpr, OFFSET: tl.constexpr,
    FACTORED: tl.constexpr, BIASED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    LINES: tl.constexpr,
):  # fmt: skip
    """OF_TOKENS: x is [tokens, inner], and out has sorted rows. Otherwise x has sorted rows, and out is in row order.
    codes, scales, factors and bias only give types; addresses are in `table`.
    """
    tile = tl.program_id(0) % tiles
    expert, begin, end = _locate_expert_tile(starts, tile, EXPERTS, EXPERTS_PAD, BLOCK_M)
    if expert >= EXPERTS:
        return
    at = begin + tl.arange(0, BLOCK_M)
    inside = at < end
    row = tl.load(order + at, mask=inside, other=0)
    if OF_TOKENS:
        read, written = row // PER_TOKEN, at
    else:
        read, written = at, row
    n = (tl.program_id(0) // tiles) * BLOCK_N + tl.arange(0, BLOCK_N)
    n_inside = n < outs
    x_rows = x + read.to(tl.int64)[None, :] * inner
    lines = weight_row_pointers(
        _expert_tensor_pointer(table, 0, expert, codes, EXPERTS), n, outs, stride, LINES, BLOCK_K
    )[:, None]
    own_scales, own_offsets = scales, scales
    if SCALED:
        own_scales = _expert_tensor_pointer(table, 1, expert, scales, EXPERTS)
        if OFFSET:
            own_offsets = _expert_tensor_pointer(table, 2, expert, scales, EXPERTS)
    total = accumulate_output_tile(
        x_rows, inside, lines, n, n_inside, own_scales, own_offsets, outs, inner, 0, stride, stride,
        group, KIND, LOW, HIGH, SCALED, OFFSET, BLOCK_M, BLOCK_N, BLOCK_K, LINES,
    )  # fmt: skip
    if FACTORED:
        total *= tl.load(_expert_tensor_pointer(table, 3, expert, factors, EXPERTS) + n, mask=n_inside, other=0.0)[
            :, None
        ]
    if BIASED:
        own_bias = _expert_tensor_pointer(table, 4, expert, bias, EXPERTS) + n
        total += tl.load(own_bias, mask=n_inside, other=0.0).to(tl.float32)[:, None]
    where = out + written.to(tl.int64)[None, :] * outs + n[:, None]
    tl.store(where, total.to(out.dtype.element_ty), mask=inside[None, :] & n_inside[:, None])


@triton.jit
def gather_rows(
    x, out, order, places, starts, size, PER_TOKEN: tl.constexpr, EXPERTS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """x is [tokens, size], out is sorted. `places` becomes the inverse of `order`."""
    at = tl.program_id(0).to(tl.int64)
    if at >= tl.load(starts + EXPERTS):
        return
    row, i = tl.load(order + at), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    part = tl.load(x + (row // PER_TOKEN).to(tl.int64) * size + i, mask=i < size, other=0.0)
    tl.store(out + at * size + i, part, mask=i < size)
    if tl.program_id(1) == 0:
        tl.store(places + row, at.to(tl.int32))


@triton.jit(do_not_specialize=["first"])
def combine_expert_outputs(
    out, given, shares, chosen, places, size, first, EXPERTS: tl.constexpr, PER_TOKEN: tl.constexpr,
    SORTED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Sum a token's expert outputs in order of choice, without other ranks' experts. If SORTED, the output of row r is
    given[places[r]].
    """
    token, i = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for choice in tl.static_range(PER_TOKEN):
        row = token * PER_TOKEN + choice
        place = tl.load(chosen + row) - first
        here = (place >= 0) & (place < EXPERTS)
        at = row
        if SORTED:
            at = tl.load(places + row, mask=here, other=0).to(tl.int64)
        part = tl.load(given + at * size + i, mask=(i < size) & here, other=0.0).to(tl.float32)
        total = tl.fma(part, tl.load(shares + row), total)
    tl.store(out + token * size + i, total.to(out.dtype.element_ty), mask=i < size)
