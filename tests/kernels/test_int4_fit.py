"""The search for 4-bit scales and zero points: compiled and reference agree, and both beat rounding to nearest."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from quire.kernels.cpu.backend import CpuBackend
from quire.kernels.int4_fit import fit_int4
from quire.kernels.reference import ReferenceBackend


def make_weight_groups(count: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Normal and heavy-tailed weights; some groups are far from zero, constant, or zero."""
    weights = torch.randn((count, 32), generator=torch.Generator().manual_seed(count))
    weights[::7] **= 3
    weights[3::11] += 4
    weights[5::13] = 0.375
    weights[6::17] = 0
    weights[8::19] *= 1e-6
    return weights.to(dtype)


def dequantize_fit(found: tuple[Tensor, Tensor, Tensor], *, zero_points: bool) -> Tensor:
    codes, scales, offsets = found
    whole = torch.stack((codes & 15, codes >> 4), -1).flatten(1).double()
    scales, offsets = scales.double()[:, None], offsets.double()[:, None]
    return (whole - offsets) * scales if zero_points else (whole - 8) * scales + offsets


@pytest.mark.parametrize("zero_points", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_int4_fit_error_matches_reference(cpu: CpuBackend, dtype: torch.dtype, zero_points: bool) -> None:
    for count in (15, 16, 1000):
        weights = make_weight_groups(count, dtype)
        errors = dequantize_fit(cpu.fit_int4(weights, zero_points=zero_points), zero_points=zero_points)
        reference_errors = dequantize_fit(fit_int4(weights, zero_points=zero_points), zero_points=zero_points)
        errors, reference_errors = ((each - weights.double()).square().sum(1) for each in (errors, reference_errors))
        size = weights.double().square().sum(1)
        # Another order of sums may round a code differently and so lead to another fit of the group.
        least = 1e-11 * size
        assert (errors <= reference_errors * 1.25 + least).all()
        assert (errors <= reference_errors * 1.001 + least).double().mean() > 0.97


def test_int4_fit_returns_integer_zero_points_and_bfloat16_scales(cpu: CpuBackend) -> None:
    for backend in (cpu, ReferenceBackend()):
        codes, scales, zeros = backend.fit_int4(make_weight_groups(500), zero_points=True)
        assert codes.shape == (500, 16)
        assert torch.equal(scales, scales.bfloat16().float())
        assert (scales > 0).all()
        assert torch.equal(zeros, zeros.round().clamp(0, 15))


def test_int4_fit_beats_rounding_to_nearest(cpu: CpuBackend) -> None:
    weights = torch.randn((2000, 32), generator=torch.Generator().manual_seed(1)).double()
    low, high = weights.aminmax(dim=1, keepdim=True)
    step = (high - low) / 15
    zero = (-low / step).round()
    nearest = (((weights / step).round() + zero).clamp(0, 15) - zero) * step
    for backend in (cpu, ReferenceBackend()):
        dequantized = dequantize_fit(backend.fit_int4(weights.float(), zero_points=True), zero_points=True)
        assert (dequantized - weights).square().sum() < 0.97 * (nearest - weights).square().sum()
