"""Calls short_conv.cpp."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.kernels.backend import AttentionMetadata
from quire.kernels.cpu import native
from quire.kernels.recurrent.short_conv import Columns, ShortConv

MOST_COLUMNS = 16
"""That a token sees, itself included: as short_conv.cpp has it."""


def check_columns(conv: ShortConv, columns: Columns, dtype: torch.dtype) -> None:
    """Raise TypeError, or ValueError, for what the kernel does not take."""
    if conv.weight.dtype != torch.float32 or (conv.bias is not None and conv.bias.dtype != torch.float32):
        raise TypeError("weight and bias of a convolution must be float32")
    kept = [each for each in (columns.ends, columns.recent) if each is not None]
    if any(each.dtype != dtype for each in kept):
        raise TypeError(f"columns of {' and '.join(str(each.dtype) for each in kept)} cannot serve {dtype}")
    if not conv.weight.is_contiguous() or not all(each[0].is_contiguous() for each in kept):
        raise ValueError("weight and columns of a convolution must be contiguous")
    if (columns.ends is not None and columns.ends.shape[1] != 1) or not 2 <= conv.width <= MOST_COLUMNS:
        raise ValueError(f"a page must be one piece, and a convolution from 2 to {MOST_COLUMNS} tokens wide")


def convolved(
    library: native.Native, bcx: Tensor, conv: ShortConv, columns: Columns, metadata: AttentionMetadata
) -> Tensor:
    check_columns(conv, columns, bcx.dtype)
    bcx, table, slots = bcx.contiguous(), metadata.block_table, metadata.state_slots
    assert slots is not None
    out = bcx.new_empty((len(bcx), bcx.shape[1] // conv.inputs))
    bias = None if conv.bias is None else conv.bias.data_ptr()
    pointers = [bcx.data_ptr(), conv.weight.data_ptr(), bias, out.data_ptr()]
    where = (columns.ends, columns.recent, metadata.query_start, metadata.context_lens, table)
    pointers += [None if each is None else each.data_ptr() for each in where]
    pages = 0 if columns.ends is None else len(columns.ends)
    counts = (pages, len(columns.recent), len(table), out.shape[1], conv.width, columns.kept, conv.gated)
    kernel = library.short_conv[bcx.dtype]
    if kernel(*pointers, table.shape[1], slots.data_ptr(), *counts, torch.get_num_threads()):
        raise IndexError("a block table or a slot names what the columns do not have")
    return out
