"""Linears by matrix tiles (kernels/cpu/tiles): with a scalar emulation, and with the library's instructions, which are
trapped if the processor has none (trap.cpp).
"""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import torch
from torch import Tensor

from quire.kernels.backend import NO_ADAPTERS
from quire.kernels.cpu import native_library
from quire.kernels.cpu.backend import CpuBackend
from quire.kernels.cpu.linear import PackedLinear
from quire.kernels.quantized_tensors import Float8Weight
from tests.kernels import test_cpu_float8, test_cpu_quantized, trapped
from tests.kernels.ragged import error

pytestmark = [pytest.mark.slow, trapped.needs_tiles]


@pytest.fixture(scope="module", params=[trapped.emulated_tiles, trapped.tiles], ids=["emulated", "instructions"])
def tiles(request: pytest.FixtureRequest) -> CpuBackend:
    return CpuBackend(request.param())


def linear(outs: int, inner: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """A weight and a bias."""
    weight = torch.randn((outs, inner), generator=generator)
    return weight.bfloat16(), torch.randn(outs, generator=generator).bfloat16()


@pytest.mark.parametrize(("outs", "inner"), [(64, 64), (130, 30), (1, 2), (200, 96), (70, 1026)])
@pytest.mark.parametrize("wide", [True, False])
def test_tiled_linear_matches_float64_in_every_batch(
    tiles: CpuBackend, outs: int, inner: int, wide: bool, generator: torch.Generator
) -> None:
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
def test_compressed_weights_give_same_bits(
    tiles: CpuBackend, inner: int, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight, bias = linear(200, inner, generator)
    weight[3, ::20] *= 2.0**-70  # an outlier that is stored uncompressed
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
    """To the nearest float32, ties to even, for numbers that are neither too large nor denormal."""
    if number == 0:
        return number
    size = Fraction(2) ** (int(np.floor(np.log2(abs(float(number))))) - 23)
    return round(number / size) * size  # round() ties to even


def test_tiled_sums_follow_amx_instruction_order(tiles: CpuBackend, generator: torch.Generator) -> None:
    """In exact arithmetic: of 32 inputs the even and the odd ones are summed separately, with one rounding per product;
    then their sum is added to the accumulator.
    """
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


def test_tiled_linear_treats_denormals_as_zero(tiles: CpuBackend) -> None:
    weight = torch.full((1, 32), 2.0**-130).bfloat16()
    packed = tiles.pack_linear(weight, None, wide=True)
    assert packed(torch.full((1, 32), 2.0**100).bfloat16(), NO_ADAPTERS).item() == 0.0


INTEGERS = [(130, 192, 32), (40, 160, 80), (33, 1600, 1600), (70, 96, 48), (1, 2, 2), (65, 768, 16), (200, 256, 128)]
"""Outputs, inputs, inputs per scale: blocks of 16 to 96 inputs. A block of 80 has five pieces, one of 96 two."""


@pytest.mark.parametrize(("outs", "inner", "group"), INTEGERS)
@pytest.mark.parametrize("offsets", [False, True])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_tiled_quantized_linear_equals_vector_kernels(
    tiles: CpuBackend, bits: int, offsets: bool, outs: int, inner: int, group: int, generator: torch.Generator
) -> None:
    """Single rows and tiles of any size; some, all or none of the blocks of x in 16 bits; embeddings too."""
    if bits < 4:
        inner, group = 512, 1 << group.bit_length() // 2 + 3
        weight = test_cpu_quantized.made_of_few_values(
            outs, inner, group, count=2**bits, generator=generator, offsets=offsets
        )
    else:
        weight = test_cpu_quantized.made(outs, inner, group, bits=bits, generator=generator, offsets=offsets)
    x = torch.randn((70, inner), generator=generator) * torch.randn(inner, generator=generator).exp()
    bias = torch.randn(outs, generator=generator)
    ids = torch.arange(outs)
    for activation_bits, dtype in (("auto", torch.bfloat16), ("auto", torch.float32), ("8", torch.bfloat16)):
        vectors, tiled = (
            CpuBackend(library, activation_bits=activation_bits)
            for library in (native_library.NativeLibrary(trapped.BASE), tiles.library)
        )
        vector_linear, tiled_linear = (
            each.pack_quantized([weight], bias, dtype=dtype, wide=True) for each in (vectors, tiled)
        )
        for rows in (1, 2, 15, 16, 17, 33, 70):
            some = x[:rows].to(dtype)
            assert torch.equal(tiled_linear(some, NO_ADAPTERS), vector_linear(some, NO_ADAPTERS)), (
                activation_bits,
                rows,
            )
        rows_of_tiles, rows_of_vectors = (
            each.pack_quantized_embedding(weight, dtype=dtype, tied=False).embed_tokens(ids)
            for each in (tiled, vectors)
        )
        assert torch.equal(rows_of_tiles, rows_of_vectors)


@pytest.mark.parametrize(("inner", "block"), [(192, 32), (300, 100), (40, 4), (160, 128), (96, 96)])
def test_tiled_float8_linear_matches_float64_in_every_batch(
    tiles: CpuBackend, inner: int, block: int, generator: torch.Generator
) -> None:
    """A row alone must equal the row in a batch, whether its pairs are kept for the next rows or not."""
    weight: Float8Weight = test_cpu_float8.made(130, inner, (1, block), generator)
    bias = torch.randn(130, generator=generator).bfloat16()
    linear = test_cpu_float8.packed(tiles, [weight], bias, dtype=torch.bfloat16)
    x = torch.randn((70, inner), generator=generator).bfloat16()
    alone = torch.cat([linear(row[None], NO_ADAPTERS) for row in x])
    assert error(alone, x.double() @ weight.dequantize().double().T + bias.double()) < 1e-5
    for rows in (2, 16, 17, 32, 33, 48, 49, 70):
        assert torch.equal(linear(x[:rows], NO_ADAPTERS), alone[:rows]), rows
        assert torch.equal(linear(x[70 - rows :], NO_ADAPTERS), alone[70 - rows :]), rows
