"""Quantized weights for the tests of quantized linears."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from quire.kernels.quantized_tensors import Float8Weight, GroupedWeight, QuantizedWeight

E2M1 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
TABLE = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
DTYPES = {torch.float32: 2e-6, torch.bfloat16: 4e-3, torch.float16: 6e-4}
"""Types, and the relative error allowed in each."""


def grouped(
    outs: int,
    inner: int,
    group: int,
    bits: int,
    generator: torch.Generator,
    *,
    offset: bool = False,
    values: tuple[int, ...] | None = None,
    ordered: bool = False,
) -> GroupedWeight:
    """Scales and offsets have 11 bits, as in checkpoints, and differ from group to group."""
    if bits == 4:
        count = 16 if values is None else len(values)
        high, low = torch.randint(0, count, (2, outs, inner // 2), generator=generator).to(torch.uint8)
        codes = high << 4 | low
    else:
        codes = torch.randint(-128, 128, (outs, inner), generator=generator).to(torch.int8)
    shape = (outs, inner // group)
    scales = (torch.rand(shape, generator=generator) + 0.1).half().float()
    offsets = (torch.randn(shape, generator=generator) * 3).half().float() if offset else None
    order = torch.randperm(inner, generator=generator) if ordered else None
    return GroupedWeight(codes, scales, offsets, values, order)


def float8(outs: int, inner: int, block: tuple[int, int], generator: torch.Generator) -> Float8Weight:
    codes = (torch.randn((outs, inner), generator=generator) * 50).to(torch.float8_e4m3fn)
    scales = torch.rand((-(-outs // block[0]), -(-inner // block[1])), generator=generator) + 0.1
    return Float8Weight(codes, scales, block)


def there(weight: QuantizedWeight, device: torch.device) -> QuantizedWeight:
    """The weight on a device."""
    if isinstance(weight, Float8Weight):
        return replace(weight, codes=weight.codes.to(device), scales=weight.scales.to(device))
    offsets, order = (None if each is None else each.to(device) for each in (weight.offsets, weight.input_order))
    return replace(
        weight, codes=weight.codes.to(device), scales=weight.scales.to(device), offsets=offsets, input_order=order
    )


FEW = 16
"""Rows up to which x is never rounded, except with --deterministic."""


def rounded(x: Tensor, *, floats: bool, block: int = 128) -> Tensor:
    """x as 8 bits represent it, [rows, in] float64; `block` inputs of a row share a scale."""
    pieces = []
    for some in x.float().split(block, dim=1):
        peak = some.abs().amax(1, keepdim=True)
        if floats:
            scale = peak / 448
            pieces.append((some / scale).to(torch.float8_e4m3fn).double() * scale.double())
        else:
            scale = peak / 127
            pieces.append((some / scale).round().double() * scale.double())
    return torch.cat(pieces, dim=1)
