"""Short convolutions (recurrent/short_conv.py). Columns in blocks are stored first, because a row may start from
columns that another row stores. Slots are updated last, after their old columns are read.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.backend import AttentionMetadata
from quire.kernels.gpu.triton_launch_sizes import cdiv, next_power_of_2
from quire.kernels.recurrent.short_conv import ConvStates, ShortConv

_MAX_CHANNELS = 512


@triton.jit
def _load_step_column(bcx, token, i, channels, wanted, GATED: tl.constexpr):
    """Gated columns are rounded to bcx's dtype."""
    if not GATED:
        return tl.load(bcx + token * channels + i, mask=wanted, other=0.0)
    at = bcx + token * 3 * channels + i
    b = tl.load(at, mask=wanted, other=0.0)
    x = tl.load(at + 2 * channels, mask=wanted, other=0.0)
    return (b.to(tl.float32) * x.to(tl.float32)).to(b.dtype)


@triton.jit
def _page_column_pointer(
    ends, table, row, table_stride, at, channels, BEFORE: tl.constexpr, PIECE: tl.constexpr, PIECES: tl.constexpr
):
    page = tl.load(table + row * table_stride + at // (PIECE * PIECES)).to(tl.int64)
    piece = page * PIECES + at % (PIECE * PIECES) // PIECE
    return ends + (piece * BEFORE + at % PIECE - (PIECE - BEFORE)) * channels


_STEP_POINTERS = ["rows", "positions", "slots", "contexts", "table"]
"""Pointers that may be unaligned."""


@triton.jit(do_not_specialize=["table_stride"], do_not_specialize_on_alignment=_STEP_POINTERS)
def _store_conv_columns_kernel(
    bcx, ends, recent, rows, positions, slots, contexts, table, table_stride, channels,
    BEFORE: tl.constexpr, KEPT: tl.constexpr, PIECE: tl.constexpr, PIECES: tl.constexpr, GATED: tl.constexpr,
    IN_PAGES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Store columns in blocks if IN_PAGES, otherwise the remaining columns in slots."""
    token, i = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row, at = tl.load(rows + token), tl.load(positions + token)
    is_end, inside = (at % PIECE >= PIECE - BEFORE) & (PIECES > 0), i < channels
    if IN_PAGES:
        to = _page_column_pointer(ends, table, row, table_stride, at, channels, BEFORE, PIECE, PIECES) + i
        wanted = inside & is_end
    else:
        to = recent + (tl.load(slots + row) * KEPT + at % KEPT) * channels + i
        wanted = inside & (is_end == 0) & (at >= tl.load(contexts + row) - KEPT)
    tl.store(to, _load_step_column(bcx, token, i, channels, wanted, GATED), mask=wanted)


@triton.jit(do_not_specialize=["table_stride"], do_not_specialize_on_alignment=[*_STEP_POINTERS[:3], "table"])
def _conv_kernel(
    out, bcx, weight, bias, ends, recent, rows, positions, slots, table, table_stride, channels,
    WIDTH: tl.constexpr, KEPT: tl.constexpr, PIECE: tl.constexpr, PIECES: tl.constexpr, GATED: tl.constexpr,
    BIASED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """PIECES is the number of pieces per block, or 0 if blocks have no columns. An earlier column is from this step
    only if its token has the same slot, because rows of one sequence may follow each other (drafts in a CUDA graph).
    """
    token, i = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = i < channels
    row, position = tl.load(rows + token), tl.load(positions + token)
    slot = tl.load(slots + row)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    if BIASED:
        total += tl.load(bias + i, mask=inside, other=0.0)
    for tap in tl.static_range(WIDTH):
        before, at = token - (WIDTH - 1 - tap), position - (WIDTH - 1 - tap)
        there = before >= 0
        other = tl.load(slots + tl.load(rows + before, mask=there, other=0))
        fresh = there & (other == slot) & (tl.load(positions + before, mask=there, other=-1) == at)
        known, is_end = (at >= 0) & (fresh == 0), (at % PIECE >= PIECE - (WIDTH - 1)) & (PIECES > 0)
        column = _load_step_column(bcx, before, i, channels, inside & fresh, GATED).to(tl.float32)
        if PIECES:
            stored = (
                _page_column_pointer(
                    ends, table, row, table_stride, tl.maximum(at, 0), channels, WIDTH - 1, PIECE, PIECES
                )
                + i
            )
            column += tl.load(stored, mask=inside & known & is_end, other=0.0).to(tl.float32)
        stored = recent + (slot * KEPT + tl.maximum(at, 0) % KEPT) * channels + i
        column += tl.load(stored, mask=inside & known & (is_end == 0), other=0.0).to(tl.float32)
        total += tl.load(weight + tap * channels + i, mask=inside, other=0.0) * column
    factor = 1.0 / (1.0 + tl.exp(-total))
    if GATED:
        factor = tl.load(bcx + token * 3 * channels + channels + i, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + token * channels + i, (factor * total).to(out.dtype.element_ty), mask=inside)


def short_conv(bcx: Tensor, conv: ShortConv, columns: ConvStates, metadata: AttentionMetadata) -> Tensor:
    bcx, slots = bcx.contiguous(), metadata.state_slots
    assert slots is not None
    tokens, channels = len(bcx), bcx.shape[1] // conv.num_input_parts
    out = bcx.new_empty((tokens, channels))
    if not tokens:
        return out
    rows = torch.arange(tokens, device=bcx.device)
    if tokens > len(slots):
        rows = torch.searchsorted(metadata.query_start, rows.int(), right=True) - 1
    block = min(next_power_of_2(channels), _MAX_CHANNELS)
    grid, table = (tokens, cdiv(channels, block)), metadata.block_table
    paged = columns.piece_ends is not None
    column_tensors = (columns.slot_columns if columns.piece_ends is None else columns.piece_ends, columns.slot_columns)
    where = (rows, metadata.positions, slots)
    sizes = (
        columns.columns_per_slot,
        columns.piece_tokens,
        0 if columns.piece_ends is None else columns.piece_ends.shape[1],
        conv.is_gated,
    )
    store = (
        bcx,
        *column_tensors,
        *where,
        metadata.context_lens,
        table,
        table.stride(0),
        channels,
        conv.conv_width - 1,
        *sizes,
    )
    if paged:
        _store_conv_columns_kernel[grid](*store, True, block)
    bias = conv.weight if conv.bias is None else conv.bias
    biased = conv.bias is not None
    _conv_kernel[grid](
        out,
        bcx,
        conv.weight,
        bias,
        *column_tensors,
        *where,
        table,
        table.stride(0),
        channels,
        conv.conv_width,
        *sizes,
        biased,
        block,
    )
    _store_conv_columns_kernel[grid](*store, False, block)
    return out
