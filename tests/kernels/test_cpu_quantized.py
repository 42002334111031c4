"""Quantized linears of the CPU backend: exact up to the rounding of x to 8 or 16 bits, and the same bits for a row in
every batch.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from quire.kernels.backend import NO_ADAPTERS
from quire.kernels.cpu import native_library
from quire.kernels.cpu.backend import CpuBackend
from quire.kernels.cpu.linears.quantized_linear import CompiledQuantizedLinear
from quire.kernels.quantized_tensors import GroupedWeight, NestedScales
from quire.kernels.reference import ReferenceBackend
from tests.kernels.ragged import assert_rows_equal_whole, error
from tests.tiers import examples

SHAPES = [(64, 64, 64), (130, 192, 32), (65, 768, 16), (200, 256, 128), (17, 30, 30), (96, 576, 64), (1, 2, 2)]
"""Outputs, inputs, inputs per scale."""
TABLE = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


def made(
    outs: int, inner: int, group: int, *, bits: int, generator: torch.Generator, offsets: bool = False
) -> GroupedWeight:
    """Scales and offsets are half floats, as in most formats, so that only x is rounded."""
    if bits == 8:
        codes = torch.randint(-128, 128, (outs, inner), generator=generator, dtype=torch.int8)
    else:
        codes = torch.randint(0, 256, (outs, inner // 2), generator=generator, dtype=torch.uint8)
    scales = torch.rand((outs, inner // group), generator=generator) * 0.01 + 0.001
    random_offsets = torch.randn((outs, inner // group), generator=generator) * 0.02
    return GroupedWeight(codes, scales.half().float(), random_offsets.half().float() if offsets else None)


def made_of_few_values(
    outs: int, inner: int, group: int, *, count: int, generator: torch.Generator, offsets: bool = False
) -> GroupedWeight:
    """Codes of `count` values, and nested scales that half floats hold exactly."""
    codes = torch.randint(0, count, (outs, inner), generator=generator, dtype=torch.uint8)
    values = tuple(torch.randperm(255, generator=generator)[:count].sub(127).tolist())
    least, most = (0, 16) if offsets else (-32, 32)
    multiples = torch.randint(least, most, (2, outs, inner // group), generator=generator, dtype=torch.int8)
    blocks = torch.ldexp(torch.ones(2, outs, inner // 256), torch.randint(-14, -8, (2, outs, inner // 256)))
    nested = (NestedScales(blocks[0], multiples[0]), NestedScales(-blocks[1], multiples[1]))
    packed_codes, numbers = codes[:, ::2] | codes[:, 1::2] << 4, [each.to_groups() for each in nested]
    return GroupedWeight(
        packed_codes, numbers[0], numbers[1] if offsets else None, values, nested=nested if offsets else nested[:1]
    )


@pytest.mark.parametrize("group", [16, 64])
@pytest.mark.parametrize("offsets", [False, True])
@pytest.mark.parametrize(("count", "bits"), [(3, 2), (4, 2), (6, 3), (8, 3), (16, 4)])
def test_codes_of_few_values_and_nested_scales_equal_four_bits(
    cpu: CpuBackend, count: int, bits: int, offsets: bool, group: int, generator: torch.Generator
) -> None:
    """The same bits as codes of 4 bits with a half float for each group give, in less memory."""
    outs, inner = 70, 512
    weight = made_of_few_values(outs, inner, group, count=count, generator=generator, offsets=offsets)
    plain = replace(weight, nested=())
    assert weight.code_values is not None
    wide = replace(plain, code_values=weight.code_values + (0,) * (16 - count))
    bias = torch.randn(outs, generator=generator)
    x = torch.randn((33, inner), generator=generator) * torch.randn(inner, generator=generator).exp()
    for dtype in (torch.float32, torch.bfloat16):
        nested_linear, plain_linear, wide_linear = (
            cpu.pack_quantized([each], bias, dtype=dtype, wide=True) for each in (weight, plain, wide)
        )
        tables = [cpu.pack_quantized_embedding(each, dtype=dtype, tied=False) for each in (weight, wide)]
        first, second = (each.embed_tokens(torch.arange(outs)) for each in tables)
        assert torch.equal(first, second)
        for rows in (1, 2, 7, 33):
            some = x[:rows].to(dtype)
            wanted = wide_linear(some, NO_ADAPTERS)
            assert torch.equal(nested_linear(some, NO_ADAPTERS), wanted)
            assert torch.equal(plain_linear(some, NO_ADAPTERS), wanted)
            assert torch.equal(nested_linear(some[-1:], NO_ADAPTERS), wanted[-1:])
    assert isinstance(nested_linear, CompiledQuantizedLinear)
    padded, halves = 96, 2 if offsets else 1
    assert nested_linear.nbytes == padded * (inner * bits // 8 + inner // group + inner // 256 * 2 * halves) + 4 * outs


def test_parts_of_few_values_are_fused_with_others(cpu: CpuBackend, generator: torch.Generator) -> None:
    weights = [
        made_of_few_values(40, 256, 16, count=4, generator=generator, offsets=True),
        made_of_few_values(33, 256, 16, count=4, generator=generator, offsets=True),
        made_of_few_values(32, 256, 32, count=6, generator=generator),
        made(50, 256, 32, bits=8, generator=generator),
    ]
    x = torch.randn((5, 256), generator=generator).bfloat16()
    linear = packed(cpu, weights)
    wanted = torch.cat([expected(x, each, linear.activation_block_size) for each in weights], 1)
    assert error(linear(x, NO_ADAPTERS), wanted) < 1e-6


OUTLIERS = {"8": torch.inf, "auto": 0.4, "16": 0.0}


def rounded(x: Tensor, block: int, bits: str = "auto") -> Tensor:
    """x in float64 as the integers represent it: multiples of 1/127 of a block's largest magnitude, or of 1/32,512 if
    that magnitude exceeds a multiple of the row's root mean square.
    """
    inner = x.shape[1]
    blocks = F.pad(x.float(), (0, -inner % block)).unflatten(1, (-1, block))
    peak = blocks.abs().amax(2, keepdim=True)
    outlier = peak > OUTLIERS[bits] * peak.square().mean(1, keepdim=True).sqrt()
    most = torch.where(outlier, 32512.0, 127.0)
    codes = (blocks * torch.where(peak > 1e-30, most / peak, 0.0)).round()
    return (codes.double() * (peak / most).double()).flatten(1)[:, :inner]


def expected(x: Tensor, weight: GroupedWeight, block: int, bits: str = "auto") -> Tensor:
    order = torch.arange(x.shape[1]) if weight.input_order is None else weight.input_order
    return rounded(x[:, order], block, bits) @ replace(weight, input_order=None).dequantize().double().T


def packed(
    cpu: CpuBackend, weights: list[GroupedWeight], bias: Tensor | None = None, *, wide: bool = True
) -> CompiledQuantizedLinear:
    linear = cpu.pack_quantized(weights, bias, dtype=torch.bfloat16, wide=wide)
    assert isinstance(linear, CompiledQuantizedLinear)
    return linear


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("offsets", [False, True])
@pytest.mark.parametrize(("outs", "inner", "group"), SHAPES)
def test_quantized_linear_matches_rounded_float64(
    cpu: CpuBackend, outs: int, inner: int, group: int, offsets: bool, bits: int, generator: torch.Generator
) -> None:
    weight = made(outs, inner, group, bits=bits, generator=generator, offsets=offsets)
    bias = torch.randn(outs, generator=generator).bfloat16()
    linear = packed(cpu, [weight], bias)
    for rows in (0, 1, 2, 5, 6, 7, 33, 200):
        x = torch.randn((rows, inner), generator=generator).bfloat16()
        got, wanted = linear(x, NO_ADAPTERS), expected(x, weight, linear.activation_block_size) + bias.double()
        assert got.shape == (rows, outs)
        assert rows == 0 or error(got, wanted) < 2e-5
        assert rows == 0 or error(got, F.linear(x.double(), weight.dequantize().double(), bias.double())) < 2e-2
        narrow = packed(cpu, [weight], bias, wide=False)(x, NO_ADAPTERS)
        assert torch.equal(narrow, got.bfloat16())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("group", [16, 32, 64])
def test_quantized_linear_applies_code_values_and_input_order(
    cpu: CpuBackend, group: int, dtype: torch.dtype, generator: torch.Generator
) -> None:
    weight = made(70, 192, group, bits=4, generator=generator)
    weight = replace(weight, code_values=TABLE, input_order=torch.randperm(192, generator=generator))
    linear = cpu.pack_quantized([weight], None, dtype=dtype)
    assert isinstance(linear, CompiledQuantizedLinear)
    x = torch.randn((9, 192), generator=generator).to(dtype)
    tolerance = 1e-5 if dtype == torch.float32 else 5e-3
    assert error(linear(x, NO_ADAPTERS), expected(x, weight, linear.activation_block_size)) < tolerance


def test_weights_of_different_bits_pack_into_one_linear(cpu: CpuBackend, generator: torch.Generator) -> None:
    """Query, key and value of one file may differ: two of 4 bits, one of 8."""
    parts = [
        made(130, 192, 32, bits=4, generator=generator),
        made(64, 192, 32, bits=4, generator=generator),
        made(70, 192, 16, bits=8, generator=generator),
        made(5, 192, 192, bits=8, generator=generator),
    ]
    bias = torch.randn(269, generator=generator)
    linear = packed(cpu, parts, bias)
    for rows in (1, 7, 40):
        x = torch.randn((rows, 192), generator=generator).bfloat16()
        wanted = torch.cat([expected(x, part, 16) for part in parts], 1) + bias.double()
        assert error(linear(x, NO_ADAPTERS), wanted) < 2e-5


@pytest.mark.usefixtures("keep_threads")
@pytest.mark.parametrize(("bits", "inner", "group", "outs"), [(8, 576, 576, 320), (4, 576, 32, 512), (8, 256, 16, 200)])
def test_quantized_linear_row_bits_do_not_depend_on_batch(
    cpu: CpuBackend, bits: int, inner: int, group: int, outs: int, generator: torch.Generator
) -> None:
    linear = packed(cpu, [made(outs, inner, group, bits=bits, generator=generator, offsets=bits == 4)])
    x = torch.randn((400, inner), generator=generator).bfloat16()
    assert_rows_equal_whole(linear, x)


_LIBRARIES = (
    []
    if isinstance(native_library.load_library_or_reason(), str)
    else [CpuBackend(native_library.NativeLibrary(isa)) for isa in native_library.loadable_isas()]
)


@pytest.mark.skipif(not _LIBRARIES, reason=str(native_library.load_library_or_reason()))
@settings(max_examples=examples(60), deadline=None)
@given(
    bits=st.sampled_from([4, 8]),
    group=st.sampled_from([16, 32, 64, 128, 0]),
    groups=st.integers(1, 5),
    outs=st.integers(1, 150),
    rows=st.integers(1, 30),
    offsets=st.booleans(),
    activation_bits=st.sampled_from(["8", "auto", "auto", "16"]),
    seed=st.integers(0, 2**31),
)
def test_quantized_linear_of_random_shape_matches_float64_on_every_isa(
    bits: int, group: int, groups: int, outs: int, rows: int, offsets: bool, activation_bits: str, seed: int
) -> None:
    """Each row alone must equal the row in the batch, and every instruction set uses the same integers."""
    generator = torch.Generator().manual_seed(seed)
    inner = group * groups or 2 * groups
    weight = made(outs, inner, group or inner, bits=bits, generator=generator, offsets=offsets)
    x = (torch.randn((rows, inner), generator=generator) * torch.randn(inner, generator=generator).exp()).bfloat16()
    for cpu in _LIBRARIES:
        linear = packed(CpuBackend(cpu.library, activation_bits=activation_bits), [weight])
        got = linear(x, NO_ADAPTERS)
        wanted = expected(x, weight, linear.activation_block_size, activation_bits)
        size = x.double().abs() @ weight.dequantize().double().abs().T
        assert ((got.double() - wanted).abs() <= 1e-5 * size + 1e-9).all(), cpu.isa
        row = seed % rows
        assert torch.equal(linear(x[row : row + 1], NO_ADAPTERS)[0], got[row])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tied", [False, True])
def test_quantized_embedding_returns_dequantized_rows(
    cpu: CpuBackend, tied: bool, dtype: torch.dtype, generator: torch.Generator
) -> None:
    for weight in (
        made(150, 30, 30, bits=8, generator=generator),
        made(150, 64, 16, bits=4, generator=generator, offsets=True),
        replace(made(150, 64, 32, bits=4, generator=generator), input_order=torch.randperm(64, generator=generator)),
    ):
        table = cpu.pack_quantized_embedding(weight, dtype=dtype, tied=tied)
        ids = torch.tensor([149, 0, 64, 63, 64], dtype=torch.int32)
        assert torch.equal(table.embed_tokens(ids), weight.dequantize()[ids].to(dtype))
        assert (table.lm_head is not None) == tied
        if table.lm_head is not None:
            logits = table.lm_head(torch.ones((2, weight.shape[1]), dtype=dtype), NO_ADAPTERS)
            assert logits.dtype == torch.float32
            assert error(logits[0], weight.dequantize().double().sum(1)) < 1e-2


def test_zero_tiny_and_nonfinite_rows_do_not_affect_other_rows(cpu: CpuBackend, generator: torch.Generator) -> None:
    linear = packed(cpu, [made(70, 96, 96, bits=8, generator=generator)])
    x = torch.randn((5, 96), generator=generator).bfloat16()
    x[0] = 0
    x[1] = 1e-38
    x[2, 50], x[3, 7] = torch.nan, -torch.inf
    got = linear(x, NO_ADAPTERS)
    assert (got[0] == 0).all()
    assert (got[1] == 0).all()
    assert got[2:4].isnan().all()
    assert torch.equal(got[4], linear(x[4:], NO_ADAPTERS)[0])


def test_packed_quantized_weights_are_copied_at_bit_width(cpu: CpuBackend, generator: torch.Generator) -> None:
    weight = made(128, 512, 32, bits=4, generator=generator)
    linear = packed(cpu, [weight])
    assert linear.nbytes == 128 * 512 * 4.5 / 8 + 128 * 4
    x = torch.ones((3, 512), dtype=torch.bfloat16)
    before = linear(x, NO_ADAPTERS)
    weight.codes.zero_()
    weight.scales.zero_()
    assert torch.equal(linear(x, NO_ADAPTERS), before)


def test_unsupported_quantized_weights_are_dequantized(cpu: CpuBackend, generator: torch.Generator) -> None:
    odd = made(20, 60, 12, bits=8, generator=generator)
    one, other = (
        replace(made(20, 64, 32, bits=4, generator=generator), input_order=torch.randperm(64, generator=generator))
        for _ in range(2)
    )
    for weights in ([odd], [one, other]):
        linear = cpu.pack_quantized(weights, None, dtype=torch.float32)
        x = torch.randn((7, weights[0].shape[1]), generator=generator)
        wanted = F.linear(x.double(), torch.cat([each.dequantize() for each in weights]).double())
        assert error(linear(x, NO_ADAPTERS), wanted) < 2e-6
        assert not isinstance(linear, CompiledQuantizedLinear)


def test_quantized_linear_matches_reference_backend(cpu: CpuBackend, generator: torch.Generator) -> None:
    weight = made(70, 192, 32, bits=4, generator=generator, offsets=True)
    x = torch.randn((5, 192), generator=generator)
    actual = cpu.pack_quantized([weight], None, dtype=torch.float32)(x, NO_ADAPTERS)
    assert (
        error(actual, ReferenceBackend().pack_quantized([weight], None, dtype=torch.float32)(x, NO_ADAPTERS).double())
        < 2e-2
    )
    with pytest.raises(TypeError, match="from 192 to 70"):
        cpu.pack_quantized([weight], None, dtype=torch.float32)(x[:, 1:], NO_ADAPTERS)
