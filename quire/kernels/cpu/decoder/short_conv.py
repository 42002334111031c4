from __future__ import annotations

import torch

from quire.kernels.recurrent.short_conv import ConvStates, ShortConv

MAX_CONV_WIDTH = 16
"""In tokens, the same as in short_conv.cpp."""


def check_short_conv(conv: ShortConv, columns: ConvStates, dtype: torch.dtype) -> None:
    """Raises TypeError or ValueError if the kernels do not support these dtypes, sizes or strides."""
    if conv.weight.dtype != torch.float32 or (conv.bias is not None and conv.bias.dtype != torch.float32):
        raise TypeError("weight and bias of a convolution must be float32")
    stored = [each for each in (columns.piece_ends, columns.slot_columns) if each is not None]
    if any(each.dtype != dtype for each in stored):
        raise TypeError(f"columns of {' and '.join(str(each.dtype) for each in stored)} cannot serve {dtype}")
    if not conv.weight.is_contiguous() or not all(each[0].is_contiguous() for each in stored):
        raise ValueError("weight and columns of a convolution must be contiguous")
    if (
        columns.piece_ends is not None and columns.piece_ends.shape[1] != 1
    ) or not 2 <= conv.conv_width <= MAX_CONV_WIDTH:
        raise ValueError(f"a block must be contiguous, and a convolution from 2 to {MAX_CONV_WIDTH} tokens wide")
