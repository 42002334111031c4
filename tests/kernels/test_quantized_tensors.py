"""Dequantization of GroupedWeight and Float8Weight, checked element by element."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from quire.kernels.quantized_tensors import Float8Weight, GroupedWeight

OUTS, INNER, GROUP = 5, 64, 16


def numbers(*shape: int) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(7)) + 0.5


@pytest.mark.parametrize("offsets", [None, numbers(OUTS, INNER // GROUP)], ids=["centred", "offset"])
@pytest.mark.parametrize("values", [None, tuple(range(-120, 120, 15))], ids=["plain", "table"])
@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("bits", [4, 8])
def test_grouped_weight_dequantizes_codes_by_group_scale(
    bits: int, ordered: bool, values: tuple[int, ...] | None, offsets: Tensor | None
) -> None:
    generator = torch.Generator().manual_seed(bits)
    low, high = (0, 256) if bits == 4 else (-128, 128)
    dtype = torch.uint8 if bits == 4 else torch.int8
    codes = torch.randint(low, high, (OUTS, INNER * bits // 8), generator=generator, dtype=torch.int32).to(dtype)
    order = torch.randperm(INNER, generator=generator) if ordered else None
    scales = numbers(OUTS, INNER // GROUP)
    weight = GroupedWeight(codes, scales, offsets, values if bits == 4 else None, order)
    assert (weight.bits, weight.shape, weight.group_size) == (bits, (OUTS, INNER), GROUP)
    dequantized = weight.dequantize()
    for out in range(OUTS):
        for i in range(INNER):
            if bits == 4:
                code = codes[out, i // 2].item() >> 4 * (i % 2) & 15
                value = code - 8 if values is None else values[code]
            else:
                value = codes[out, i].item()
            expected = value * scales[out, i // GROUP] + (0 if offsets is None else offsets[out, i // GROUP])
            assert dequantized[out, i if order is None else order[i]] == expected


@pytest.mark.parametrize(("outs", "inner", "block"), [(5, 7, (5, 7)), (5, 7, (1, 7)), (300, 200, (128, 128))])
def test_float8_weight_dequantizes_codes_by_block_scale(outs: int, inner: int, block: tuple[int, int]) -> None:
    codes = numbers(outs, inner).to(torch.float8_e4m3fn)
    scales = numbers(-(-outs // block[0]), -(-inner // block[1]))
    dequantized = Float8Weight(codes, scales, block).dequantize()
    for out in range(0, outs, 7):
        for i in range(0, inner, 5):
            assert dequantized[out, i] == codes[out, i].float() * scales[out // block[0], i // block[1]]
