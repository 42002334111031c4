"""8-bit float linears of the CPU backend: exact up to rounding of sums, and the same bits for a row in any batch."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from quire.kernels.backend import NO_ADAPTERS
from quire.kernels.cpu import native_library
from quire.kernels.cpu.backend import CpuBackend
from quire.kernels.cpu.quantization.float8_linear import Float8Linear
from quire.kernels.quantized_tensors import Float8Weight, GroupedWeight
from tests.kernels.ragged import assert_rows_equal_whole
from tests.tiers import examples

_LIBRARIES = (
    []
    if isinstance(native_library.load_library_or_reason(), str)
    else [CpuBackend(native_library.NativeLibrary(isa)) for isa in native_library.loadable_isas()]
)
compiled = pytest.mark.skipif(not _LIBRARIES, reason=str(native_library.load_library_or_reason()))


def made(outs: int, inner: int, block: tuple[int, int], generator: torch.Generator) -> Float8Weight:
    """Codes exclude the two NaNs and include subnormal numbers and both zeros."""
    codes = torch.randint(0, 256, (outs, inner), generator=generator, dtype=torch.int32).to(torch.uint8)
    codes[codes & 127 == 127] = 130
    shape = (-(-outs // block[0]), -(-inner // block[1]))
    scales = torch.rand(shape, generator=generator) * 0.01 + 0.001
    return Float8Weight(codes.view(torch.float8_e4m3fn), scales, block)


def packed(
    cpu: CpuBackend, weights: list[Float8Weight], bias: Tensor | None = None, *, dtype: torch.dtype, wide: bool = True
) -> Float8Linear:
    linear = cpu.pack_quantized(weights, bias, dtype=dtype, wide=wide)
    assert isinstance(linear, Float8Linear)
    return linear


def test_every_float8_code_decodes_as_in_pytorch(cpu: CpuBackend) -> None:
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(torch.float8_e4m3fn).view(64, 4)
    linear = packed(cpu, [Float8Weight(codes, torch.ones(1, 1), (64, 4))], dtype=torch.float32)
    got = linear(torch.eye(4), NO_ADAPTERS).T
    broken = codes.float().isnan().any(1)
    assert torch.equal(got[~broken], codes.float()[~broken])
    assert broken.sum() == 2
    assert got[broken].isnan().all()


@compiled
@settings(max_examples=examples(60), deadline=None)
@given(
    inputs=st.sampled_from([4, 32, 128, 0]),
    blocks=st.integers(1, 5),
    of_outs=st.sampled_from([1, 48, 128]),
    outs=st.integers(1, 200),
    rows=st.integers(1, 40),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 2**31),
)
def test_float8_linear_of_random_shape_matches_float64_on_every_isa(
    inputs: int, blocks: int, of_outs: int, outs: int, rows: int, dtype: torch.dtype, seed: int
) -> None:
    """Each row alone must equal the row in the batch."""
    generator = torch.Generator().manual_seed(seed)
    inner = inputs * blocks - (inputs // 8 * 4 if blocks > 1 else 0) or 4 * blocks  # the last block may be smaller
    weight = made(outs, inner, (of_outs, inputs or inner), generator)
    bias = torch.randn(outs, generator=generator).to(dtype)
    x = torch.randn((rows, inner), generator=generator).to(dtype)
    expected = x.double() @ weight.dequantize().double().T + bias.double()
    size = x.double().abs() @ weight.dequantize().double().abs().T + bias.double().abs()
    for cpu in _LIBRARIES:
        got = packed(cpu, [weight], bias, dtype=dtype)(x, NO_ADAPTERS)
        assert ((got.double() - expected).abs() <= 2e-6 * size).all(), cpu.isa
        narrow = packed(cpu, [weight], bias, dtype=dtype, wide=False)
        assert torch.equal(narrow(x, NO_ADAPTERS), got.to(dtype))
        row = seed % rows
        assert torch.equal(narrow(x[row : row + 1], NO_ADAPTERS)[0], narrow(x, NO_ADAPTERS)[row])


@pytest.mark.usefixtures("keep_threads")
@pytest.mark.parametrize("inputs", [576, 128])
def test_float8_linear_row_bits_do_not_depend_on_batch(
    cpu: CpuBackend, inputs: int, generator: torch.Generator
) -> None:
    linear = packed(cpu, [made(320, 576, (1, inputs), generator)], dtype=torch.bfloat16)
    x = torch.randn((400, 576), generator=generator).bfloat16()
    assert_rows_equal_whole(linear, x)


def test_weights_with_different_scale_blocks_pack_into_one_linear(cpu: CpuBackend, generator: torch.Generator) -> None:
    parts = [made(130, 192, block, generator) for block in ((130, 192), (1, 192), (64, 192))]
    x = torch.randn((7, 192), generator=generator)
    got = packed(cpu, parts, dtype=torch.float32)(x, NO_ADAPTERS)
    expected = torch.cat([x.double() @ part.dequantize().double().T for part in parts], 1)
    assert (got - expected).abs().max() < 1e-4 * expected.abs().max()


def test_packed_float8_weights_take_one_byte_each(cpu: CpuBackend, generator: torch.Generator) -> None:
    assert packed(cpu, [made(128, 512, (1, 512), generator)], dtype=torch.bfloat16).nbytes == 128 * 512 + 128 * 4
    linear = packed(cpu, [made(128, 512, (128, 128), generator)], dtype=torch.bfloat16)
    assert linear.nbytes < 128 * 512 * 1.04


def test_unsupported_float8_weights_are_dequantized(cpu: CpuBackend, generator: torch.Generator) -> None:
    inner = 60
    whole, grouped = made(20, inner, (1, inner), generator), torch.randint(-9, 9, (20, inner), dtype=torch.int8)
    others = [made(20, inner, (1, 12), generator), GroupedWeight(grouped, torch.ones(20, 1))]
    for weights in ([made(20, 62, (1, 62), generator)], [whole, others[0]], [whole, others[1]]):
        linear = cpu.pack_quantized(weights, None, dtype=torch.float32)
        x = torch.randn((3, weights[0].shape[1]), generator=generator)
        expected = x.double() @ torch.cat([each.dequantize() for each in weights]).double().T
        assert not isinstance(linear, Float8Linear)
        assert (linear(x, NO_ADAPTERS) - expected).abs().max() < 1e-5 * expected.abs().max()
