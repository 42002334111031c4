"""What short_conv.cpp takes."""

from __future__ import annotations

import torch

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
