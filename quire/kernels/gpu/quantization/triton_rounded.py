"""Kernels that round x to 8 bits (int8 or float8), alone or in the norm or gate that computes x. Fused kernels round
the value that unfused ones would store, so bits are the same.
"""

from __future__ import annotations

import triton
import triton.language as tl

from quire.kernels.gpu.triton_fused import gated_activation, norm_row_with_residual
from quire.kernels.gpu.triton_kv_quantization import to_float8, to_integer


@triton.jit
def _quantization_scale(most, KIND: tl.constexpr):
    steps: tl.constexpr = 127.0 if KIND == 0 else 448.0
    return tl.maximum(tl.div_rn(most, steps), 1.1754943508222875e-38)


@triton.jit
def _quantize_values(numbers, scales, KIND: tl.constexpr):
    return to_integer(numbers, scales) if KIND == 0 else to_float8(tl.div_rn(numbers, scales))


@triton.jit
def _interleaved_column(column, PAIRED: tl.constexpr):
    """Return where a column's code is stored. Unless PAIRED is 0, each 2 * PAIRED columns share 16-bit words: the first
    half has the low bytes, the second half the high bytes.
    """
    if PAIRED:
        return column // (2 * PAIRED) * (2 * PAIRED) + column % PAIRED * 2 + column // PAIRED % 2
    else:
        return column


@triton.jit
def _interleave_codes(codes, PAIRED: tl.constexpr):
    """The row's size must be a multiple of 2 * PAIRED."""
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
    """`numbers` are float32 [BLOCKS, BLOCK] from block `first` on. A NaN makes its block's scale NaN."""
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
    """x [rows, size] to codes [rows, size] and scales [blocks, rows]."""
    row, first = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCKS
    column = (first + tl.arange(0, BLOCKS))[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    numbers = tl.load(x + row * size + column, mask=column < size, other=0.0).to(tl.float32)
    _quantize_and_store_blocks(numbers, codes, scales, row, rows, first, size, KIND, PAIRED)


@triton.jit
def round_per_row(x, codes, scales, size, KIND: tl.constexpr, PAIRED: tl.constexpr, BLOCK: tl.constexpr):
    """x [rows, size] to codes [rows, size] and scales [rows]."""
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
    """WHOLE: also store the unrounded result to `out`. Codes are stored from a [BLOCKS, BLOCK] layout. If they were
    stored from the layout in which the norm sums, a thread would have 16 numbers instead of the norm kernel's 8, so the
    order of the sum would change.
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
    """Compute codes [rows, size] and scales [blocks, rows] of the gate's output."""
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
    """Read a row's inputs twice: first to compute the row's scale, then, from the cache, to round."""
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
