"""The linear of --deterministic: close to float64, and the same bits for a row in every batch."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from quire.kernels.backend import NO_ADAPTERS
from quire.kernels.gpu.linears.triton_linear import pack_linear
from tests.kernels.ragged import error

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 6e-3, torch.float16: 1e-3}


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("inner", "outs"), [(64, 64), (200, 130), (30, 7)])
def test_deterministic_linear_matches_float64(
    inner: int, outs: int, biased: bool, dtype: torch.dtype, device: torch.device, generator: torch.Generator
) -> None:
    weight, bias = (torch.randn(s, generator=generator).to(device, dtype) for s in ((outs, inner), (outs,)))
    for rows in (0, 1, 7, 64, 65):
        x = torch.randn((rows, inner), generator=generator).to(device, dtype)
        expected = F.linear(x.double(), weight.double(), bias.double() if biased else None)
        for wide in (False, True):
            got = pack_linear(weight, bias if biased else None, wide=wide)(x, NO_ADAPTERS)
            assert got.shape == (rows, outs)
            assert got.dtype == (torch.float32 if wide else dtype)
            assert rows == 0 or error(got.cpu(), expected.cpu()) < TOLERANCE[dtype]


def test_linear_with_many_outputs_matches_float64(device: torch.device, generator: torch.Generator) -> None:
    weight = torch.randn((8200, 64), generator=generator).to(device)
    x = torch.randn((3, 64), generator=generator).to(device)
    expected = F.linear(x.double(), weight.double())
    assert error(pack_linear(weight, None)(x, NO_ADAPTERS).cpu(), expected.cpu()) < 2e-6


@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_deterministic_linear_row_bits_do_not_depend_on_batch(
    dtype: torch.dtype, device: torch.device, generator: torch.Generator
) -> None:
    weight = torch.randn((130, 200), generator=generator).to(device, dtype)
    linear = pack_linear(weight, None)
    x = torch.randn((140, 200), generator=generator).to(device, dtype)
    whole = linear(x, NO_ADAPTERS)
    for begin, rows in [(0, 1), (139, 1), (7, 2), (3, 64), (70, 70)]:
        assert torch.equal(linear(x[begin : begin + rows], NO_ADAPTERS), whole[begin : begin + rows])
