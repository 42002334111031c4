"""x in 8 bits, integers or floats, as products of few bits take it: a scale for each row, or for each block of a row;
rounded by itself, or by the norm or the gate that makes it.

The latter round what they would have stored, a number of the type of x, by the same operations: so both ways have the
same bits. A row's largest number needs no order, and what a norm sums it sums by the code that norms alone.
"""

from __future__ import annotations

import triton
import triton.language as tl

from quire.kernels.gpu.triton_fused import gated_activation, norm_row_with_residual
from quire.kernels.gpu.triton_kv_quantization import to_float8, to_integer


@triton.jit
def _quantization_scale(most, KIND: tl.constexpr):
    """Of numbers up to `most`."""
    steps: tl.constexpr = 127.0 if KIND == 0 else 448.0
    return tl.maximum(tl.div_rn(most, steps), 1.1754943508222875e-38)


@triton.jit
def _quantize_values(numbers, scales, KIND: tl.constexpr):
    return to_integer(numbers, scales) if KIND == 0 else to_float8(tl.div_rn(numbers, scales))


@triton.jit
def _interleaved_column(column, PAIRED: tl.constexpr):
    """Where a column's code is in its row. PAIRED, if not 0: of two steps of so many columns the first ones are the
    lower bytes of words of 16 bits, the others the upper ones, as packing.py lays weights."""
    if PAIRED:
        return column // (2 * PAIRED) * (2 * PAIRED) + column % PAIRED * 2 + column // PAIRED % 2
    else:
        return column


@triton.jit
def _interleave_codes(codes, PAIRED: tl.constexpr):
    """Codes of a row, of whole pairs of steps, as they lie there."""
    if PAIRED:
        size: tl.constexpr = codes.shape[0]
        apart = tl.reshape(codes, (size // (2 * PAIRED), 2, PAIRED))
        return tl.reshape(tl.permute(apart, (0, 2, 1)), (size,))
    else:
        return codes


@triton.jit
def _quantize_and_store_blocks(
    numbers, codes, scales, row, rows, first, size, KIND: tl.constexpr, PAIRED: tl.constexpr
):
    """Codes of numbers [BLOCKS, BLOCK], float32, those of a row from block `first` on, and their scales. A scale is NaN
    where one of its numbers is no number."""
    BLOCKS: tl.constexpr = numbers.shape[0]
    BLOCK: tl.constexpr = numbers.shape[1]
    block = first + tl.arange(0, BLOCKS)
    column = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    scale = _quantization_scale(tl.max(tl.abs(numbers), 1), KIND)
    rounded = _quantize_values(numbers, tl.broadcast_to(scale[:, None], (BLOCKS, BLOCK)), KIND)
    tl.store(codes + row * size + _interleaved_column(column, PAIRED), rounded, mask=column < size)
    scale += tl.sum(numbers * 0.0, 1)  # 0, or NaN
    tl.store(scales + block.to(tl.int64) * rows + row, scale, mask=block * BLOCK < size)


@triton.jit(do_not_specialize=["rows"])
def round_per_block(
    x, codes, scales, rows, size,
    KIND: tl.constexpr, PAIRED: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Codes [rows, size] and scales [blocks, rows] of x. Grid: rows, blocks by BLOCKS."""
    row, first = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCKS
    column = (first + tl.arange(0, BLOCKS))[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    numbers = tl.load(x + row * size + column, mask=column < size, other=0.0).to(tl.float32)
    _quantize_and_store_blocks(numbers, codes, scales, row, rows, first, size, KIND, PAIRED)


@triton.jit
def round_per_row(x, codes, scales, size, KIND: tl.constexpr, PAIRED: tl.constexpr, BLOCK: tl.constexpr):
    """The same with one scale for each row: scales [rows]. Grid: rows."""
    row, i = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    most, bad = tl.zeros((BLOCK,), dtype=tl.float32), tl.zeros((BLOCK,), dtype=tl.float32)
    for begin in range(0, size, BLOCK):
        numbers = tl.load(x + row * size + begin + i, mask=begin + i < size, other=0.0).to(tl.float32)
        most, bad = tl.maximum(most, tl.abs(numbers)), bad + numbers * 0.0
    scale = _quantization_scale(tl.max(most, 0), KIND)
    spread = tl.broadcast_to(scale, (BLOCK,))
    for begin in range(0, size, BLOCK):
        inside = begin + i < size
        numbers = tl.load(x + row * size + begin + i, mask=inside, other=0.0).to(tl.float32)
        rounded = _interleave_codes(_quantize_values(numbers, spread, KIND), PAIRED)
        tl.store(codes + row * size + begin + i, rounded, mask=inside)
    tl.store(scales + row, scale + tl.sum(bad, 0))


@triton.jit(do_not_specialize=["rows"])
def norm_rounded(
    out, codes, scales, x, residual, weight, bias, eps, rows,
    SIZE: tl.constexpr, ROW: tl.constexpr, ADD: tl.constexpr, CENTRED: tl.constexpr, WHOLE: tl.constexpr,
    KIND: tl.constexpr, PAIRED: tl.constexpr, BLOCK: tl.constexpr, BY_BLOCKS: tl.constexpr,
):  # fmt: skip
    """A norm's row in codes, with a scale for each of its blocks or for all of it. WHOLE: also as it is, to out. Grid:
    rows.

    Codes are stored from blocks, either way: stored as they are summed, 16 bytes a thread, they would have the compiler
    give each thread 16 numbers of a row, and not 8 as the norm alone does, and so another order to the norm's sum.
    """
    row, i = tl.program_id(0).to(tl.int64), tl.arange(0, ROW)
    at, inside = row * SIZE + i, i < SIZE
    normed = norm_row_with_residual(x, residual, weight, bias, at, i, inside, eps, SIZE, ADD, CENTRED)
    if WHOLE:
        tl.store(out + at, normed, mask=inside)
    BLOCKS: tl.constexpr = ROW // BLOCK
    numbers = tl.reshape(tl.where(inside, normed.to(tl.float32), 0.0), (BLOCKS, BLOCK))
    if BY_BLOCKS:
        _quantize_and_store_blocks(numbers, codes, scales, row, rows, 0, SIZE, KIND, PAIRED)
    else:
        scale = _quantization_scale(tl.max(tl.max(tl.abs(numbers), 1), 0), KIND)
        column = tl.arange(0, BLOCKS)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
        rounded = _quantize_values(numbers, tl.broadcast_to(scale, (BLOCKS, BLOCK)), KIND)
        tl.store(codes + row * SIZE + _interleaved_column(column, PAIRED), rounded, mask=column < SIZE)
        tl.store(scales + row, scale + tl.sum(tl.sum(numbers * 0.0, 1), 0))


@triton.jit(do_not_specialize=["rows"])
def gate_rounded(
    out, codes, scales, gate_up, rows, size,
    GELU: tl.constexpr, WHOLE: tl.constexpr, KIND: tl.constexpr, PAIRED: tl.constexpr, BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
):  # fmt: skip
    """A gate's rows in codes [rows, size], and scales [blocks, rows]. Grid: rows, blocks by BLOCKS."""
    row, first = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCKS
    column = (first + tl.arange(0, BLOCKS))[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = column < size
    gate_output = gated_activation(gate_up + row * 2 * size, size, column, inside, GELU)
    if WHOLE:
        tl.store(out + row * size + column, gate_output, mask=inside)
    _quantize_and_store_blocks(gate_output.to(tl.float32), codes, scales, row, rows, first, size, KIND, PAIRED)


@triton.jit
def gate_rounded_per_row(
    out, codes, scales, gate_up, size,
    GELU: tl.constexpr, WHOLE: tl.constexpr, KIND: tl.constexpr, PAIRED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The same with one scale for each row: scales [rows]. What is read first is still near when it is read again.
    Grid: rows."""
    row, i = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    most, bad = tl.zeros((BLOCK,), dtype=tl.float32), tl.zeros((BLOCK,), dtype=tl.float32)
    for begin in range(0, size, BLOCK):
        inside = begin + i < size
        gate_output = gated_activation(gate_up + row * 2 * size, size, begin + i, inside, GELU)
        if WHOLE:
            tl.store(out + row * size + begin + i, gate_output, mask=inside)
        numbers = gate_output.to(tl.float32)
        most, bad = tl.maximum(most, tl.abs(numbers)), bad + numbers * 0.0
    scale = _quantization_scale(tl.max(most, 0), KIND)
    spread = tl.broadcast_to(scale, (BLOCK,))
    for begin in range(0, size, BLOCK):
        inside = begin + i < size
        numbers = gated_activation(gate_up + row * 2 * size, size, begin + i, inside, GELU).to(tl.float32)
        rounded = _interleave_codes(_quantize_values(numbers, spread, KIND), PAIRED)
        tl.store(codes + row * size + begin + i, rounded, mask=inside)
    tl.store(scales + row, scale + tl.sum(bad, 0))
