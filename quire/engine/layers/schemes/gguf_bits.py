"""Reads numbers, codes and scales from GGUF blocks, which are [out, blocks, bytes] uint8."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.kernels.quantized_tensors import GroupedWeight, NestedScales


def read_float16(data: Tensor, *, keepdim: bool = False) -> Tensor:
    """Maps [..., blocks, 2] bytes to float32 [..., blocks], or [..., blocks, 1] with `keepdim`."""
    numbers = data.contiguous().view(torch.float16).float()
    return numbers if keepdim else numbers.squeeze(-1)


def read_uint16(data: Tensor) -> Tensor:
    """Maps [..., bytes] to [..., bytes / 2] int32."""
    return data.contiguous().view(torch.int16).int() & 0xFFFF


def read_uint32(data: Tensor) -> Tensor:
    """Maps [..., bytes] to [..., bytes / 4] int64."""
    return data.contiguous().view(torch.int32).long() & 0xFFFFFFFF


def shift_and_mask(data: Tensor, shifts: range | tuple[int, ...], mask: int) -> Tensor:
    """Maps [..., n] to [..., n * len(shifts)]: each number is shifted right by each of `shifts`, and masked."""
    distances = torch.tensor(tuple(shifts), dtype=data.dtype, device=data.device)
    return (data.unsqueeze(-1) >> distances & mask).flatten(-2)


def unpack_nibbles(data: Tensor) -> Tensor:
    """Maps [out, blocks, bytes] to [out, in] uint8. Low nibbles are the first half of a block, high ones the second."""
    return torch.cat((data & 15, data >> 4), -1).flatten(1)


def unpack_single_bits(data: Tensor) -> Tensor:
    """Maps [out, blocks, bytes] to [out, in] uint8, lowest bit first."""
    return (data.unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8, device=data.device) & 1).flatten(1)


def unpack_code_planes(data: Tensor, shifts: range | tuple[int, ...], mask: int, width: int = 32) -> Tensor:
    """Maps [out, blocks, bytes] to [out, in] uint8. Every `width` bytes contain one plane of codes per shift, in the
    order of `shifts`.
    """
    planes = data.unflatten(-1, (-1, 1, width)) >> torch.tensor(
        tuple(shifts), dtype=torch.uint8, device=data.device
    ).view(-1, 1)
    return (planes & mask).flatten(1)


def pack_nibbles(codes: Tensor) -> Tensor:
    """Maps [out, in] to [out, in / 2], low nibble first."""
    return codes[:, ::2] | codes[:, 1::2] << 4


def to_signed(codes: Tensor, zero: int) -> Tensor:
    return codes.to(torch.int8) - zero


def make_nested_weight(
    codes: Tensor, values: tuple[int, ...], scales: NestedScales, offsets: NestedScales | None = None
) -> GroupedWeight:
    """`codes` [out, in] uint8."""
    nested = (scales,) if offsets is None else (scales, offsets)
    return GroupedWeight(
        pack_nibbles(codes), scales.to_groups(), None if offsets is None else offsets.to_groups(), values, nested=nested
    )
