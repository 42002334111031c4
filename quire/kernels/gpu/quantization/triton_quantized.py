"""Products with quantized weights, decoded in registers.

`multiply_weight_only` decodes exactly to x's dtype. Scales and offsets are applied to the float32 sums once per step,
which lies in one group. Weights are the left operand, because 64 outputs fill a tensor core's rows even if x has few.

Few rows fill a GPU only if the inner dimension is split (`multiply_split_k`, `reduce_split_k`). NESTED makes the same
sums in the same order, so with one tile size a row has the same bits in every batch. Integers become floats by bit
operations and one addition, because the GPU converts at an eighth of that rate.
"""

from __future__ import annotations

import triton
import triton.language as tl

from quire.kernels.gpu.quantization.ptx_decode import HAS_PTX, byte_decode_asm, nibble_decode_asm
from quire.kernels.gpu.triton_kv_quantization import from_float8

INTEGERS, FLOATS, NIBBLES, TABLE, NUMBERS, NIBBLE_FLOATS = range(6)
"""INTEGERS: int8. FLOATS: float8 bits. Both are one per byte, or two per 16-bit word. NIBBLES: four 4-bit codes per
word with the value code - 8. TABLE: four 4-bit codes per word, which index a table of values. NUMBERS: numbers of x's
dtype. NIBBLE_FLOATS: four 4-bit floats (e2m1) per word, whose values are doubled.
"""


@triton.constexpr_function
def _codes_per_word(kind: int, bits: int) -> int:
    return 1 if kind == 4 or bits == 8 else 2 if kind in (0, 1) else 4


@triton.jit
def _decode_packed_codes(
    codes, part: tl.constexpr, KIND: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr, dtype: tl.constexpr
):
    """LOW and HIGH are 64-bit integers whose bytes are the first and the last 8 values of a table."""
    wide: tl.constexpr = dtype == tl.bfloat16
    short: tl.constexpr = tl.bfloat16 if wide else tl.float16
    fits: tl.constexpr = HAS_PTX and codes.dtype == tl.int16 and (wide or dtype == tl.float16)
    if KIND == 4:
        return codes
    elif fits and (KIND == 0 or KIND == 1):
        return tl.inline_asm_elementwise(
            byte_decode_asm(KIND == 1, wide, part), "=r,r", [codes], dtype=short.value, is_pure=True, pack=2
        )
    elif fits and (KIND == 2 or KIND == 5):
        return tl.inline_asm_elementwise(
            nibble_decode_asm(KIND == 5, wide, part), "=r,r", [codes], dtype=short.value, is_pure=True, pack=2
        )
    else:
        return _code_to_float32(_extract_code(codes, part, KIND), KIND, LOW, HIGH).to(dtype)


@triton.jit
def _extract_code(words, part, KIND: tl.constexpr):
    if KIND == 2 or KIND == 3 or KIND == 5:
        return (words >> (4 * part)) & 15
    elif words.dtype == tl.int16:
        return (words >> (8 * part)).to(tl.uint8)
    else:
        return words.to(tl.uint8, bitcast=True)


@triton.jit
def _code_to_float32(code, KIND: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr):
    if KIND == 0:
        return _offset_bytes_to_float32(code ^ 128, 128.0)
    elif KIND == 1:
        return from_float8(code)
    elif KIND == 2:
        return _offset_bytes_to_float32(code, 8.0)
    elif KIND == 5:
        bits = code.to(tl.uint32)
        bits = ((bits & 7) << 22) | ((bits & 8) << 28)  # the exponent is 126 too small
        return bits.to(tl.float32, bitcast=True) * 1.7014118346046923e38
    else:
        low = tl.full(code.shape, LOW, tl.int64)
        high = tl.full(code.shape, HIGH, tl.int64)
        return (tl.where(code < 8, low, high) >> ((code & 7) * 8).to(tl.int64)).to(tl.int8).to(tl.float32)


@triton.jit
def _offset_bytes_to_float32(code, less: tl.constexpr):
    return (code.to(tl.uint32) | 0x4B000000).to(tl.float32, bitcast=True) - (8388608.0 + less)


@triton.jit
def weight_row_pointers(codes, n, outs, stride, LINES: tl.constexpr, STEP: tl.constexpr):
    """STEP words of each of LINES outputs lie side by side, then the next STEP of each. Outputs past the last get valid
    pointers, because reading elsewhere may fault.
    """
    wide = n.to(tl.int64)
    side = wide // LINES
    if LINES > 1:
        side = tl.minimum(side, (outs - 1) // LINES)
    return codes + side * LINES * stride + wide % LINES * STEP


@triton.jit
def _load_scales_per_part(
    scales, at, n, n_inside, outs, inner, group, PARTS: tl.constexpr, BLOCK_K: tl.constexpr
):  # fmt: skip
    """Return for outputs n one scale per part of the step that begins at input `at`."""
    first = _load_group_scale(scales, at, n, n_inside, outs, inner, group)
    if PARTS == 1:
        return (first,)
    elif PARTS == 2:
        return (first, _load_group_scale(scales, at + BLOCK_K, n, n_inside, outs, inner, group))
    else:
        second = _load_group_scale(scales, at + BLOCK_K, n, n_inside, outs, inner, group)
        third = _load_group_scale(scales, at + 2 * BLOCK_K, n, n_inside, outs, inner, group)
        fourth = _load_group_scale(scales, at + 3 * BLOCK_K, n, n_inside, outs, inner, group)
        return (first, second, third, fourth)


@triton.jit
def _load_group_scale(scales, at, n, n_inside, outs, inner, group):
    return tl.load(scales + (at // group) * outs + n, mask=n_inside & (at < inner), other=0.0)


@triton.jit
def accumulate_output_tile(  # noqa: PLR0912
    x_rows, m_inside, lines, n, n_inside, scales, offsets, outs, inner, first, end, stride, group,
    KIND: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr, SCALED: tl.constexpr, OFFSET: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, LINES: tl.constexpr,
):  # fmt: skip
    """Sum over words `first` to `end`. The lowest codes of BLOCK_K words are consecutive inputs, followed by the next
    codes. Scales are read one step ahead, because Triton prefetches only dot operands.
    """
    parts: tl.constexpr = _codes_per_word(KIND, lines.dtype.element_ty.primitive_bitwidth)
    dtype: tl.constexpr = x_rows.dtype.element_ty
    k = tl.arange(0, BLOCK_K)
    total = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    if SCALED:
        next_scales = _load_scales_per_part(scales, first * parts, n, n_inside, outs, inner, group, parts, BLOCK_K)
        if OFFSET:
            next_offsets = _load_scales_per_part(
                offsets, first * parts, n, n_inside, outs, inner, group, parts, BLOCK_K
            )
    for begin in range(first, end, BLOCK_K):
        if LINES > 1:
            packed = tl.load(lines + begin * LINES + k[None, :])
        else:
            packed = tl.load(
                lines + begin + k[None, :], mask=n_inside[:, None] & (begin + k < stride)[None, :], other=0
            )
        if SCALED:
            after = (begin + BLOCK_K) * parts
            own_scales = next_scales
            next_scales = _load_scales_per_part(scales, after, n, n_inside, outs, inner, group, parts, BLOCK_K)
            if OFFSET:
                own_offsets = next_offsets
                next_offsets = _load_scales_per_part(offsets, after, n, n_inside, outs, inner, group, parts, BLOCK_K)
        for part in tl.static_range(parts):
            at = begin * parts + part * BLOCK_K
            there = (at + k < inner)[:, None] & m_inside[None, :]
            right = tl.load(x_rows + at + k[:, None], mask=there, other=0.0)
            left = _decode_packed_codes(packed, part, KIND, LOW, HIGH, dtype)
            if SCALED:
                scale = own_scales[part].to(tl.float32)
                total += tl.dot(left, right, input_precision="ieee") * scale[:, None]
                if OFFSET:
                    offset = own_offsets[part].to(tl.float32)
                    if dtype == tl.float32:
                        total += offset[:, None] * tl.sum(right, 0)[None, :]
                    else:
                        ones = tl.full((BLOCK_N, BLOCK_K), 1.0, tl.float32).to(dtype)
                        total += tl.dot(ones, right) * offset[:, None]
            else:
                total = tl.dot(left, right, total, input_precision="ieee")
    return total


@triton.jit
def _scale_and_store_tile(total, factors, bias, out, m, n, rows, outs, out_stride, BIASED: tl.constexpr):
    n_inside = n < outs
    added = tl.zeros_like(n).to(tl.float32)
    if BIASED:
        added = tl.load(bias + n, mask=n_inside, other=0.0).to(tl.float32)
    factor = tl.load(factors + n, mask=n_inside, other=0.0)
    total = tl.fma(total, tl.broadcast_to(factor[:, None], total.shape), tl.broadcast_to(added[:, None], total.shape))
    where = out + m.to(tl.int64)[None, :] * out_stride + n[:, None]
    tl.store(where, total.to(out.dtype.element_ty), mask=(m < rows)[None, :] & n_inside[:, None])


@triton.jit(do_not_specialize=["rows", "parts"])
def multiply_weight_only(
    x, codes, scales, offsets, factors, bias, out, rows, outs, inner, stride, out_stride, group, length, parts,
    KIND: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr, SCALED: tl.constexpr, OFFSET: tl.constexpr,
    BIASED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, LINES: tl.constexpr,
    NESTED: tl.constexpr,
):  # fmt: skip
    """If NESTED, each of the `parts` parts of a line, which have `length` words, gets its own sum."""
    tiles_m = tl.cdiv(rows, BLOCK_M)
    m = (tl.program_id(0) % tiles_m) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = (tl.program_id(0) // tiles_m) * BLOCK_N + tl.arange(0, BLOCK_N)
    x_rows = x + m.to(tl.int64)[None, :] * inner
    lines = weight_row_pointers(codes, n, outs, stride, LINES, BLOCK_K)[:, None]
    if NESTED:
        total = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
        for part in range(parts):
            total += accumulate_output_tile(
                x_rows, m < rows, lines, n, n < outs, scales, offsets, outs, inner,
                part * length, tl.minimum((part + 1) * length, stride), stride, group,
                KIND, LOW, HIGH, SCALED, OFFSET, BLOCK_M, BLOCK_N, BLOCK_K, LINES,
            )  # fmt: skip
    else:
        total = accumulate_output_tile(
            x_rows, m < rows, lines, n, n < outs, scales, offsets, outs, inner, 0, stride, stride, group,
            KIND, LOW, HIGH, SCALED, OFFSET, BLOCK_M, BLOCK_N, BLOCK_K, LINES,
        )  # fmt: skip
    _scale_and_store_tile(total, factors, bias, out, m, n, rows, outs, out_stride, BIASED)


@triton.jit(do_not_specialize=["rows"])
def multiply_split_k(
    x, codes, scales, offsets, sums, rows, outs, inner, stride, group, length,
    KIND: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr, SCALED: tl.constexpr, OFFSET: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, LINES: tl.constexpr,
):  # fmt: skip
    """sums are [parts, rows, outs] float32. A part has `length` words of each line."""
    tiles_m, part = tl.cdiv(rows, BLOCK_M), tl.program_id(1)
    m = (tl.program_id(0) % tiles_m) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = (tl.program_id(0) // tiles_m) * BLOCK_N + tl.arange(0, BLOCK_N)
    total = accumulate_output_tile(
        x + m.to(tl.int64)[None, :] * inner, m < rows,
        weight_row_pointers(codes, n, outs, stride, LINES, BLOCK_K)[:, None], n, n < outs,
        scales, offsets, outs, inner, part * length, tl.minimum((part + 1) * length, stride), stride, group,
        KIND, LOW, HIGH, SCALED, OFFSET, BLOCK_M, BLOCK_N, BLOCK_K, LINES,
    )  # fmt: skip
    where = sums + (part * rows + m).to(tl.int64)[None, :] * outs + n[:, None]
    tl.store(where, total, mask=(m < rows)[None, :] & (n < outs)[:, None])


@triton.jit(do_not_specialize=["rows", "parts"])
def reduce_split_k(
    sums, factors, bias, out, rows, outs, out_stride, parts, BIASED: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    row, n = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = n < outs
    total, added = tl.zeros((BLOCK,), dtype=tl.float32), tl.zeros((BLOCK,), dtype=tl.float32)
    for part in range(parts):
        total += tl.load(sums + (part * rows + row) * outs + n, mask=inside, other=0.0)
    if BIASED:
        added = tl.load(bias + n, mask=inside, other=0.0).to(tl.float32)
    total = tl.fma(total, tl.load(factors + n, mask=inside, other=0.0), added)
    tl.store(out + row * out_stride + n, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def dequantize_weights(
    codes, scales, offsets, factors, out, outs, first, inner, stride, group,
    KIND: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr, SCALED: tl.constexpr, OFFSET: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, LINES: tl.constexpr,
):  # fmt: skip
    """Write the weights of outputs from `first` on to out [rows, inner]."""
    parts: tl.constexpr = _codes_per_word(KIND, codes.dtype.element_ty.primitive_bitwidth)
    row, k = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    n = first + row
    inside, begin = n < outs, tl.program_id(1) * BLOCK_K
    where = weight_row_pointers(codes, n, outs, stride, LINES, BLOCK_K)[:, None] + begin * LINES + k[None, :]
    packed = tl.load(where, mask=inside[:, None] & (begin + k < stride)[None, :], other=0)
    factor = tl.load(factors + n, mask=inside, other=0.0)[:, None]
    for part in tl.static_range(parts):
        at = begin * parts + part * BLOCK_K
        value = _decode_packed_codes(packed, part, KIND, LOW, HIGH, out.dtype.element_ty).to(tl.float32)
        if SCALED:
            known = inside & (at < inner)
            of = (at // group) * outs + n
            value *= tl.load(scales + of, mask=known, other=0.0).to(tl.float32)[:, None]
            if OFFSET:
                value += tl.load(offsets + of, mask=known, other=0.0).to(tl.float32)[:, None]
        to = out + row.to(tl.int64)[:, None] * inner + at + k[None, :]
        tl.store(to, (value * factor).to(out.dtype.element_ty), mask=inside[:, None] & (at + k < inner)[None, :])


@triton.jit(do_not_specialize=["rows"])
def multiply_block_scaled_codes(
    x, x_scales, codes, scales, factors, bias, out, rows, outs, inner, out_stride, group,
    SCALED: tl.constexpr, BIASED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """x has codes too. In x and in weights, BLOCK_K inputs share a scale."""
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
    _scale_and_store_tile(total, factors, bias, out, m, n, rows, outs, out_stride, BIASED)


@triton.jit(do_not_specialize=["rows"])
def multiply_integers(
    x, x_scales, codes, factors, bias, out, rows, outs, inner,
    BIASED: tl.constexpr, WHOLE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    TOGETHER: tl.constexpr,
):  # fmt: skip
    """x has one scale per row, weights one factor per output. WHOLE: inner is a multiple of BLOCK_K. TOGETHER row tiles
    are neighbors in the grid, to share the cache.
    """
    tiles_m = tl.cdiv(rows, BLOCK_M)
    width = TOGETHER * tl.cdiv(outs, BLOCK_N)
    first = tl.program_id(0) // width * TOGETHER
    height, at = tl.minimum(tiles_m - first, TOGETHER), tl.program_id(0) % width
    m = (first + at % height) * BLOCK_M + tl.arange(0, BLOCK_M)
    n, k = at // height * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    m_inside, n_inside = m < rows, n < outs
    x_rows = x + (m % rows).to(tl.int64)[:, None] * inner
    lines = codes + (n % outs).to(tl.int64)[None, :] * inner
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.int32)
    for begin in range(0, inner, BLOCK_K):
        if WHOLE:
            left, right = tl.load(x_rows + begin + k[None, :]), tl.load(lines + begin + k[:, None])
        else:
            inside = begin + k < inner
            left = tl.load(x_rows + begin + k[None, :], mask=inside[None, :], other=0)
            right = tl.load(lines + begin + k[:, None], mask=inside[:, None], other=0)
        total = tl.dot(left, right, total, out_dtype=tl.int32)
    added = tl.zeros((BLOCK_N,), dtype=tl.float32)
    if BIASED:
        added = tl.load(bias + n, mask=n_inside, other=0.0).to(tl.float32)
    scale, factor = tl.load(x_scales + m, mask=m_inside, other=0.0), tl.load(factors + n, mask=n_inside, other=0.0)
    scaled = total.to(tl.float32) * scale[:, None]
    scaled = tl.fma(
        scaled, tl.broadcast_to(factor[None, :], scaled.shape), tl.broadcast_to(added[None, :], scaled.shape)
    )
    where = out + m.to(tl.int64)[:, None] * outs + n[None, :]
    tl.store(where, scaled.to(out.dtype.element_ty), mask=m_inside[:, None] & n_inside[None, :])


@triton.jit
def scale_sums(sums, x_scales, factors, bias, out, outs, out_stride, BIASED: tl.constexpr, BLOCK: tl.constexpr):
    """Compute out [rows, outs] from integer sums, a scale per row and a factor per output."""
    row, n = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = n < outs
    total = tl.load(sums + row * outs + n, mask=inside, other=0).to(tl.float32) * tl.load(x_scales + row)
    added = tl.zeros((BLOCK,), dtype=tl.float32)
    if BIASED:
        added = tl.load(bias + n, mask=inside, other=0.0).to(tl.float32)
    total = tl.fma(total, tl.load(factors + n, mask=inside, other=0.0), added)
    tl.store(out + row * out_stride + n, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def look_up_embedding_rows(
    ids, codes, scales, offsets, factors, out, outs, inner, stride, group,
    KIND: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr, SCALED: tl.constexpr, OFFSET: tl.constexpr,
    STEP: tl.constexpr, LINES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """out is [ids, inner]. STEP is the BLOCK_K of the matrix products."""
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < inner
    row = tl.load(ids + tl.program_id(0)).to(tl.int64)
    line = weight_row_pointers(codes, row, outs, stride, LINES, STEP)
    parts: tl.constexpr = _codes_per_word(KIND, codes.dtype.element_ty.primitive_bitwidth)
    if parts == 1:
        value = _code_to_float32(_extract_code(tl.load(line + column, mask=inside, other=0), 0, KIND), KIND, LOW, HIGH)
    else:
        packed = tl.load(line + column // (parts * STEP) * STEP * LINES + column % STEP, mask=inside, other=0)
        value = _code_to_float32(_extract_code(packed, (column // STEP % parts).to(tl.int16), KIND), KIND, LOW, HIGH)
    if SCALED:
        at = (column // group).to(tl.int64) * outs + row
        value *= tl.load(scales + at, mask=inside, other=0.0).to(tl.float32)
        if OFFSET:
            value += tl.load(offsets + at, mask=inside, other=0.0).to(tl.float32)
    value *= tl.load(factors + row)
    tl.store(out + tl.program_id(0).to(tl.int64) * inner + column, value.to(out.dtype.element_ty), mask=inside)
