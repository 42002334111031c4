"""Linears by matrix tiles (kernels/cpu/tiles), whose instructions are computed one number after the other here, so that
every machine can test all but the instructions themselves; those are tested by every other test where they are."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from quire.kernels.backend import NO_ADAPTERS
from quire.kernels.cpu import build, native
from quire.kernels.cpu.backend import Cpu
from quire.kernels.cpu.linear import PackedLinear
from tests.kernels.conftest import emulates, with_tiles
from tests.kernels.ragged import error

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not emulates(native.runnable()), reason="no compiler, no AVX-512 with bf16, or tiles"),
]


@pytest.fixture(scope="module")
def tiles() -> Cpu:
    return Cpu(with_tiles())


def linear(outs: int, inner: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """A weight and a bias."""
    weight = torch.randn((outs, inner), generator=generator)
    return weight.bfloat16(), torch.randn(outs, generator=generator).bfloat16()


@pytest.mark.parametrize(("outs", "inner"), [(64, 64), (130, 30), (1, 2), (200, 96), (70, 1026)])
@pytest.mark.parametrize("wide", [True, False])
def test_products(tiles: Cpu, outs: int, inner: int, wide: bool, generator: torch.Generator) -> None:
    weight, bias = linear(outs, inner, generator)
    packed = tiles.pack_linear(weight, bias, wide=wide)
    assert isinstance(packed, PackedLinear)
    x = torch.randn((70, inner), generator=generator).bfloat16()
    wanted = torch.nn.functional.linear(x.double(), weight.double(), bias.double())
    alone = torch.cat([packed(row[None], NO_ADAPTERS) for row in x])
    assert error(alone, wanted) < (1e-5 if wide else 1e-2)
    for rows in (2, 15, 16, 17, 31, 32, 33, 48, 50, 64, 70):
        assert torch.equal(packed(x[:rows], NO_ADAPTERS), alone[:rows]), rows
        assert torch.equal(packed(x[70 - rows :], NO_ADAPTERS), alone[70 - rows :]), rows


@pytest.mark.parametrize("inner", [96, 70])
def test_compressed_weights_give_the_same_bits(
    tiles: Cpu, inner: int, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight, bias = linear(200, inner, generator)
    weight[3, ::20] *= 2.0**-70  # which is kept whole
    compressed = tiles.pack_linear(weight, bias)
    monkeypatch.setattr(tiles.library, "compressed_size", lambda *_: 0)
    plain = tiles.pack_linear(weight, bias)
    assert isinstance(compressed, PackedLinear)
    assert isinstance(plain, PackedLinear)
    assert (bool(compressed.native.compressed), bool(plain.native.compressed)) == (True, False)
    x = torch.randn((100, inner), generator=generator).bfloat16()
    for rows in (1, 7, 16, 17, 33, 48, 100):
        assert torch.equal(compressed(x[:rows], NO_ADAPTERS), plain(x[:rows], NO_ADAPTERS)), rows


def rounded(number: Fraction) -> Fraction:
    """To the nearest float32, ties to even; of numbers that are neither too large nor denormal."""
    if number == 0:
        return number
    size = Fraction(2) ** (int(np.floor(np.log2(abs(float(number))))) - 23)
    return round(number / size) * size  # round() ties to even


def test_the_order_of_sums_is_the_instructions(tiles: Cpu, generator: torch.Generator) -> None:
    """In exact numbers: even and odd inputs of 32 apart, each product added with one rounding, then their sum to what
    there was."""
    weight = torch.randn((5, 96), generator=generator).bfloat16()
    x = torch.randn((3, 96), generator=generator).bfloat16()
    got = tiles.pack_linear(weight, None, wide=True)(x, NO_ADAPTERS)
    for r in range(3):
        for o in range(5):
            a, b = ([Fraction(each) for each in row.tolist()] for row in (x[r], weight[o]))
            total = Fraction(0)
            for begin in range(0, 96, 32):
                halves = []
                for parity in (0, 1):
                    some = Fraction(0)
                    for i in range(begin + parity, begin + 32, 2):
                        some = rounded(some + a[i] * b[i])
                    halves.append(some)
                total = rounded(total + rounded(halves[0] + halves[1]))
            assert Fraction(got[r, o].item()) == total


def test_denormals_count_as_zero(tiles: Cpu) -> None:
    weight = torch.full((1, 32), 2.0**-130).bfloat16()
    packed = tiles.pack_linear(weight, None, wide=True)
    assert packed(torch.full((1, 32), 2.0**100).bfloat16(), NO_ADAPTERS).item() == 0.0


def test_a_wheel_carries_the_instructions(tmp_path: Path) -> None:
    """Compiled, where the compiler knows them; whether they run here is not asked."""
    command = build.compiler()
    assert command is not None
    assert build.build(command, ["avx512_amx"], tmp_path) == {}
    assert (tmp_path / "avx512_amx.so").exists()
