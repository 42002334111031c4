"""Products with weights of few bits on a GPU, which stay in their bits until they are in registers.

`multiply_whole` takes x as it is: codes become numbers of its type, which holds them exactly, and tensor cores multiply
these; scales and offsets join the sums in float32, once for each step of the inner dimension, which lies in one group.
`multiply_codes` takes x in 8 bits as `round_rows` makes it, integers or floats, with a scale for each 128 inputs of a
row, and tensor cores multiply codes. Products are of weights by x, not of x by weights: 64 outputs fill a tensor core's
rows also where x has few.

As in triton_linear.py nothing is split, so with tiles of one size a row has the same bits in every batch.
"""

from __future__ import annotations

import triton
import triton.language as tl

from quire.kernels.gpu.triton_codes import from_float8, to_float8, to_integer

INTEGERS, FLOATS, HALVES, TABLE, NUMBERS = range(5)
"""What codes are: int8; the bits of 8-bit floats; two integers of 4 bits in a byte, where a code less 8 is its value;
two with a table of values; numbers of the type of x."""


@triton.jit
def _values(codes, half: tl.constexpr, KIND: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr, dtype: tl.constexpr):
    """What codes stand for, in that type; of bytes of two codes the lower or the upper. LOW and HIGH are a table's 16
    values, a byte each."""
    if KIND == 0:
        return codes.to(dtype)
    elif KIND == 1:
        return from_float8(codes).to(dtype)
    elif KIND == 4:
        return codes
    else:
        code = (codes >> (4 * half)) & 15
        if KIND == 2:
            return (code.to(tl.int8) - 8).to(dtype)
        else:
            low = tl.full(code.shape, LOW, tl.int64)
            high = tl.full(code.shape, HIGH, tl.int64)
            return (tl.where(code < 8, low, high) >> ((code & 7) * 8).to(tl.int64)).to(tl.int8).to(dtype)


@triton.jit
def sum_whole(
    x_rows, m_inside, lines, n, n_inside, scales, offsets, outs, inner, stride, group,
    KIND: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr, SCALED: tl.constexpr, OFFSET: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Sums [BLOCK_N, BLOCK_M] of outputs n, whose codes are at lines [BLOCK_N, 1], for rows at x_rows [1, BLOCK_M].
    Half bytes: the lower ones of BLOCK_K bytes are as many inputs, the upper ones the next."""
    halves: tl.constexpr = 2 if KIND == 2 or KIND == 3 else 1
    k = tl.arange(0, BLOCK_K)
    total = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    for begin in range(0, stride, BLOCK_K):
        inside = n_inside[:, None] & (begin + k < stride)[None, :]
        packed = tl.load(lines + begin + k[None, :], mask=inside, other=0)
        for half in tl.static_range(halves):
            first = begin * halves + half * BLOCK_K
            there = (first + k < inner)[:, None] & m_inside[None, :]
            right = tl.load(x_rows + first + k[:, None], mask=there, other=0.0)
            left = _values(packed, half, KIND, LOW, HIGH, x_rows.dtype.element_ty)
            if SCALED:
                at = (first // group) * outs + n
                known = n_inside & (first < inner)
                scale = tl.load(scales + at, mask=known, other=0.0).to(tl.float32)
                total += tl.dot(left, right, input_precision="ieee") * scale[:, None]
                if OFFSET:
                    offset = tl.load(offsets + at, mask=known, other=0.0).to(tl.float32)
                    total += offset[:, None] * tl.sum(right.to(tl.float32), 0)[None, :]
            else:
                total = tl.dot(left, right, total, input_precision="ieee")
    return total


@triton.jit
def _finish(total, factors, bias, out, m, n, rows, outs, out_stride, BIASED: tl.constexpr):
    """Scale a tile of sums [outputs, rows] by its outputs' factors, and store it."""
    n_inside = n < outs
    total *= tl.load(factors + n, mask=n_inside, other=0.0)[:, None]
    if BIASED:
        total += tl.load(bias + n, mask=n_inside, other=0.0).to(tl.float32)[:, None]
    where = out + m.to(tl.int64)[None, :] * out_stride + n[:, None]
    tl.store(where, total.to(out.dtype.element_ty), mask=(m < rows)[None, :] & n_inside[:, None])


@triton.jit(do_not_specialize=["rows"])
def multiply_whole(
    x, codes, scales, offsets, factors, bias, out, rows, outs, inner, stride, out_stride, group,
    KIND: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr, SCALED: tl.constexpr, OFFSET: tl.constexpr,
    BIASED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """out [rows, outs] of x [rows, inner] and codes [outs, stride]; a program: BLOCK_N outputs of BLOCK_M rows."""
    tiles_m = tl.cdiv(rows, BLOCK_M)
    m = (tl.program_id(0) % tiles_m) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = (tl.program_id(0) // tiles_m) * BLOCK_N + tl.arange(0, BLOCK_N)
    x_rows, lines = x + m.to(tl.int64)[None, :] * inner, codes + n.to(tl.int64)[:, None] * stride
    total = sum_whole(
        x_rows, m < rows, lines, n, n < outs, scales, offsets, outs, inner, stride, group,
        KIND, LOW, HIGH, SCALED, OFFSET, BLOCK_M, BLOCK_N, BLOCK_K,
    )  # fmt: skip
    _finish(total, factors, bias, out, m, n, rows, outs, out_stride, BIASED)


@triton.jit(do_not_specialize=["rows"])
def multiply_codes(
    x, x_scales, codes, scales, factors, bias, out, rows, outs, inner, out_stride, group,
    SCALED: tl.constexpr, BIASED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """The same of x in codes, as `round_rows` makes them: BLOCK_K inputs share a scale in x, and in the weights."""
    tiles_m = tl.cdiv(rows, BLOCK_M)
    m = (tl.program_id(0) % tiles_m) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = (tl.program_id(0) // tiles_m) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    m_inside, n_inside = m < rows, n < outs
    x_rows = x + m.to(tl.int64)[None, :] * inner
    lines = codes + n.to(tl.int64)[:, None] * inner
    total = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    for begin in range(0, inner, BLOCK_K):
        k_inside = begin + k < inner
        left = tl.load(lines + begin + k[None, :], mask=n_inside[:, None] & k_inside[None, :], other=0.0)
        right = tl.load(x_rows + begin + k[:, None], mask=k_inside[:, None] & m_inside[None, :], other=0.0)
        scale = tl.load(x_scales + (begin // BLOCK_K) * rows + m, mask=m_inside, other=0.0)
        part = tl.dot(left, right).to(tl.float32) * scale[None, :]
        if SCALED:
            at = (begin // group) * outs + n
            part *= tl.load(scales + at, mask=n_inside, other=0.0).to(tl.float32)[:, None]
        total += part
    _finish(total, factors, bias, out, m, n, rows, outs, out_stride, BIASED)


@triton.jit(do_not_specialize=["rows"])
def round_rows(x, codes, scales, rows, inner, KIND: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr):
    """Codes [rows, inner] and scales [blocks, rows] of x. A scale is NaN where one of its numbers is no number."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    column = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = column < inner
    numbers = tl.load(x + row * inner + column, mask=inside, other=0.0).to(tl.float32)
    steps: tl.constexpr = 127.0 if KIND == 0 else 448.0
    scale = tl.maximum(tl.div_rn(tl.max(tl.abs(numbers), 1), steps), 1.1754943508222875e-38)
    spread = tl.broadcast_to(scale[:, None], (BLOCKS, BLOCK))
    rounded = to_integer(numbers, spread) if KIND == 0 else to_float8(tl.div_rn(numbers, spread))
    tl.store(codes + row * inner + column, rounded, mask=inside)
    scale += tl.sum(numbers * 0.0, 1)  # 0, or NaN
    tl.store(scales + block.to(tl.int64) * rows + row, scale, mask=block * BLOCK < inner)


@triton.jit
def look_up(
    ids, codes, scales, offsets, factors, out, outs, inner, stride, group,
    KIND: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr, SCALED: tl.constexpr, OFFSET: tl.constexpr,
    STEP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Rows of the weight, [ids, inner]; STEP: BLOCK_K of the products."""
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < inner
    row = tl.load(ids + tl.program_id(0)).to(tl.int64)
    line = codes + row * stride
    if KIND == 2 or KIND == 3:
        packed = tl.load(line + column // (2 * STEP) * STEP + column % STEP, mask=inside, other=0)
        upper = _values(packed, 1, KIND, LOW, HIGH, tl.float32)
        value = tl.where(column // STEP % 2 == 1, upper, _values(packed, 0, KIND, LOW, HIGH, tl.float32))
    else:
        value = _values(tl.load(line + column, mask=inside, other=0), 0, KIND, LOW, HIGH, tl.float32)
    if SCALED:
        at = (column // group).to(tl.int64) * outs + row
        value *= tl.load(scales + at, mask=inside, other=0.0).to(tl.float32)
        if OFFSET:
            value += tl.load(offsets + at, mask=inside, other=0.0).to(tl.float32)
    value *= tl.load(factors + row)
    tl.store(out + tl.program_id(0).to(tl.int64) * inner + column, value.to(out.dtype.element_ty), mask=inside)
