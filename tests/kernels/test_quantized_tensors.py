"""Dequantization of GroupedWeight and Float8Weight, checked element by element."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from quire.kernels.quantized_tensors import Float8Weight, GroupedWeight, NestedScales

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


def test_nested_scales_keep_their_groups_when_narrowed_or_appended() -> None:
    multiples = torch.arange(3 * 8, dtype=torch.int8).view(3, 8)
    nested = NestedScales(numbers(3, 2), multiples)
    groups = nested.to_groups()
    assert groups[2, 5] == nested.blocks[2, 1] * multiples[2, 5]
    narrowed = nested.narrow(range(1, 3), range(4, 8))
    assert narrowed is not None
    assert torch.equal(narrowed.to_groups(), groups[1:, 4:])
    assert nested.narrow(None, range(2, 8)) is None, "half a block"
    assert torch.equal(nested.append_outputs(nested).to_groups(), torch.cat((groups, groups)))


def test_nested_halves_are_exact_beside_an_unused_block() -> None:
    scale = torch.tensor(3e-5).half().float().item()
    nested = NestedScales(torch.tensor([[scale, 60000.0]]), torch.tensor([[1, 31, 0, 0]], dtype=torch.int8))
    weight = GroupedWeight(torch.zeros((1, 128), dtype=torch.uint8), nested.to_groups(), nested=(nested,))
    factors, (halves,), multiples = weight.to_factors_and_nested_halves()
    assert (halves.float() * factors).tolist() == [[scale, 0.0]]
    assert multiples.tolist() == [[1, 31, 0, 0]]
