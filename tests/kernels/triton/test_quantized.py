"""Quantized linears in Triton: against float64 and the reference's rounding, and each row alone against its batch."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from quire.kernels.backend import NO_ADAPTERS
from quire.kernels.gpu.quantization import quantized_linear, weight_packing
from quire.kernels.gpu.triton_backend import TritonBackend
from tests.kernels.ragged import error
from tests.kernels.triton.few_bits import DTYPES, E2M1, FEW, TABLE, float8, grouped, rounded, there

WHOLE = {
    "4 bits": (32, 4, {}),
    "4 bits, offsets": (32, 4, {"offset": True}),
    "4 bits, table": (32, 4, {"values": TABLE}),
    "4-bit floats": (32, 4, {"values": E2M1}),
    "8 values": (32, 4, {"values": (8, 25, 43, 0, -8, -25, -43, -1)}),
    "4 consecutive values": (16, 4, {"values": (-1, 0, 1, 2), "offset": True}),
    "4 bits, ordered": (64, 4, {"ordered": True}),
    "8 bits": (32, 8, {}),
    "8 bits, offsets, ordered": (64, 8, {"offset": True, "ordered": True}),
}
"""Group size, bits and options of weights that are multiplied by unrounded x."""


@pytest.mark.parametrize("dtype", list(DTYPES))
@pytest.mark.parametrize("kind", list(WHOLE))
def test_grouped_weight_linear_matches_float64(
    kind: str, dtype: torch.dtype, device: torch.device, generator: torch.Generator
) -> None:
    group, bits, more = WHOLE[kind]
    weight = grouped(70, 192, group, bits, generator, **more)
    bias = torch.randn(70, generator=generator).to(dtype)
    for rows in (0, 1, 20, 70):
        x = torch.randn((rows, 192), generator=generator).to(dtype)
        expected = x.double() @ weight.dequantize().double().T + bias.double()
        for wide in (False, True):
            linear = TritonBackend().pack_quantized([there(weight, device)], bias.to(device), dtype=dtype, wide=wide)
            got = linear(x.to(device), NO_ADAPTERS)
            assert got.shape == (rows, 70)
            assert got.dtype == (torch.float32 if wide else dtype)
            assert rows == 0 or error(got.cpu(), expected) < (2e-6 if wide else DTYPES[dtype])


@pytest.mark.parametrize("offset", [False, True])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(
    ("inner", "group"), [(16, 16), (48, 16), (96, 48), (100, 100), (130, 130), (256, 128), (320, 64), (576, 32)]
)
def test_linear_supports_all_group_sizes(
    inner: int, group: int, bits: int, offset: bool, device: torch.device, generator: torch.Generator
) -> None:
    """All multiples of 16, and one group for all inputs, whatever their number."""
    weight, x = grouped(35, inner, group, bits, generator, offset=offset), torch.randn((3, inner), generator=generator)
    linear = TritonBackend().pack_quantized([there(weight, device)], None, dtype=x.dtype)
    assert isinstance(linear, quantized_linear.TritonQuantizedLinear)
    assert linear.parts[0].rounds_activations == (bits == 8 and group == inner and not offset)
    assert error(linear(x.to(device), NO_ADAPTERS).cpu(), x.double() @ weight.dequantize().double().T) < 2e-6


def test_codes_of_consecutive_values_need_no_table(generator: torch.Generator) -> None:
    weight = grouped(35, 64, 16, 4, generator, values=tuple(range(-4, 4)))
    packed = weight_packing.pack_group_quantized(weight)
    centered = weight_packing.pack_group_quantized(replace(weight, codes=weight.codes + 0x44, code_values=None))
    assert packed is not None
    assert centered is not None
    assert packed.kernel_form == centered.kernel_form
    assert torch.equal(packed.codes, centered.codes)


BLOCKS = [(70, 200), (1, 200), (128, 128), (32, 128), (1, 64), (48, 16)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("block", BLOCKS, ids=str)
@pytest.mark.parametrize("native", [False, True])
def test_float8_linear_matches_float64(
    native: bool,
    block: tuple[int, int],
    dtype: torch.dtype,
    device: torch.device,
    generator: torch.Generator,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """GPUs without 8-bit float products do not round x."""
    if native and not quantized_linear.can_multiply_float8(torch.empty(0, device=device)):
        pytest.skip("this GPU multiplies no 8-bit floats")
    monkeypatch.setattr(quantized_linear, "can_multiply_float8", lambda codes: native)
    weight = float8(70, 200, block, generator)
    linear = TritonBackend().pack_quantized([there(weight, device)], None, dtype=dtype, wide=True)
    assert isinstance(linear, quantized_linear.TritonQuantizedLinear)
    assert linear.parts[0].rounds_activations == (native and block[1] >= 128)
    for rows in (1, 20, 70):
        x = torch.randn((rows, 200), generator=generator).to(dtype)
        seen = rounded(x, floats=True) if linear.parts[0].rounds_activations and rows > FEW else x.double()
        expected = seen @ weight.dequantize().double().T
        # GPU products of 8-bit floats accumulate with few bits: an error of 2.7e-4 on an H100.
        most = 1e-3 if device.type == "cuda" and linear.parts[0].rounds_activations and rows > FEW else 1e-5
        assert error(linear(x.to(device), NO_ADAPTERS).cpu(), expected) < most


@pytest.mark.parametrize("dtype", list(DTYPES))
def test_int8_linear_rounds_activations_per_block(
    dtype: torch.dtype, device: torch.device, generator: torch.Generator
) -> None:
    weight, bias = grouped(70, 200, 200, 8, generator), torch.randn(70, generator=generator).to(dtype)
    linear = TritonBackend().pack_quantized([there(weight, device)], bias.to(device), dtype=dtype)
    for rows in (0, 1, 20, 70):
        x = torch.randn((rows, 200), generator=generator).to(dtype)
        x[:, 3] *= 100  # an outlier degrades only its own block
        x[rows // 2 :, 128:] = 0
        seen = rounded(x, floats=False).nan_to_num() if rows > FEW else x.double()
        expected = seen @ weight.dequantize().double().T + bias.double()
        got = linear(x.to(device), NO_ADAPTERS)
        assert got.dtype == dtype
        assert rows == 0 or error(got.cpu(), expected) < DTYPES[dtype]


@pytest.mark.parametrize("kind", ["integers", "floats"])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_nonfinite_input_does_not_affect_other_rows(
    kind: str, bad: float, device: torch.device, generator: torch.Generator
) -> None:
    weight = grouped(5, 130, 130, 8, generator) if kind == "integers" else float8(5, 130, (5, 130), generator)
    linear = TritonBackend().pack_quantized([there(weight, device)], None, dtype=torch.float32)
    for rows in (3, 20):
        x = torch.randn((rows, 130), generator=generator)
        x[1, 129] = bad
        got = linear(x.to(device), NO_ADAPTERS).cpu()
        assert not got[1].isfinite().any()
        assert torch.cat((got[:1], got[2:])).isfinite().all()


def test_nan_float8_code_gives_nan_factor(device: torch.device, generator: torch.Generator) -> None:
    weight = float8(4, 64, (1, 64), generator)
    weight.codes[2, 7] = torch.nan
    for packed in (weight_packing.pack_float8(weight, native=native) for native in (False, True)):
        assert packed is not None
        assert packed.factors.isnan().tolist() == [False, False, True, False]


def test_weights_of_different_formats_pack_into_one_linear(device: torch.device, generator: torch.Generator) -> None:
    """Each weight has its own columns; equal formats share one product."""
    weights = [
        grouped(33, 128, 32, 4, generator, offset=True),
        grouped(40, 128, 32, 4, generator, offset=True),
        grouped(7, 128, 16, 8, generator),
        float8(50, 128, (50, 64), generator),
        grouped(20, 128, 64, 4, generator, values=TABLE, ordered=True),
    ]
    bias = torch.randn(150, generator=generator)
    linear = TritonBackend().pack_quantized(
        [there(each, device) for each in weights], bias.to(device), dtype=torch.float32
    )
    assert isinstance(linear, quantized_linear.TritonQuantizedLinear)
    assert [each.out_features for each in linear.parts] == [73, 7, 50, 20]
    x = torch.randn((5, 128), generator=generator)
    whole = torch.cat([each.dequantize() for each in weights])
    assert error(linear(x.to(device), NO_ADAPTERS).cpu(), x.double() @ whole.double().T + bias) < 2e-6


def test_unsupported_group_size_is_dequantized(device: torch.device, generator: torch.Generator) -> None:
    weight = grouped(6, 40, 8, 8, generator)
    linear = TritonBackend().pack_quantized([there(weight, device)], None, dtype=torch.float32)
    assert not isinstance(linear, quantized_linear.TritonQuantizedLinear)
    x = torch.randn((2, 40), generator=generator)
    assert error(linear(x.to(device), NO_ADAPTERS).cpu(), x.double() @ weight.dequantize().double().T) < 2e-6


ALIKE = {
    "4 bits": lambda generator: grouped(70, 192, 32, 4, generator, offset=True),
    "table": lambda generator: grouped(70, 192, 64, 4, generator, values=TABLE),
    "8 bits": lambda generator: grouped(70, 192, 64, 8, generator),
    "x in integers": lambda generator: grouped(70, 192, 192, 8, generator),
    "4-bit floats": lambda generator: grouped(70, 192, 32, 4, generator, values=E2M1),
    "x in floats": lambda generator: float8(70, 192, (128, 128), generator),
    "floats": lambda generator: float8(70, 192, (1, 64), generator),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", list(ALIKE))
def test_deterministic_quantized_linear_row_bits_do_not_depend_on_batch(
    kind: str, dtype: torch.dtype, device: torch.device, generator: torch.Generator
) -> None:
    weight = there(ALIKE[kind](generator), device)
    linear = TritonBackend(deterministic=True).pack_quantized([weight], None, dtype=dtype)
    x = torch.randn((80, 192), generator=generator).to(device, dtype)
    whole = linear(x, NO_ADAPTERS)
    for begin, rows in [(0, 1), (79, 1), (7, 2), (3, 64), (10, 70)]:
        assert torch.equal(linear(x[begin : begin + rows], NO_ADAPTERS), whole[begin : begin + rows])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", list(ALIKE))
def test_quantized_embedding_returns_dequantized_rows(
    kind: str, dtype: torch.dtype, device: torch.device, generator: torch.Generator
) -> None:
    weight = ALIKE[kind](generator)
    ids = torch.tensor([3, 69, 0, 3])
    for tied in (False, True):
        table = TritonBackend().pack_quantized_embedding(there(weight, device), dtype=dtype, tied=tied)
        assert table.embed_tokens(ids[:0].to(device)).shape == (0, 192)
        got = table.embed_tokens(ids.to(device))
        assert got.dtype == dtype
        # One rounding to the type; two if an offset follows the scale.
        assert torch.allclose(got.cpu().double(), weight.dequantize()[ids].double(), rtol=DTYPES[dtype], atol=1e-6)
        assert (table.lm_head is not None) == tied
    assert table.lm_head is not None
    x = torch.randn((2, 192), generator=generator).to(device, dtype)
    alone = TritonBackend().pack_quantized([there(weight, device)], None, dtype=dtype, wide=True)
    assert torch.equal(table.lm_head(x, NO_ADAPTERS), alone(x, NO_ADAPTERS))


def test_packed_weights_stay_within_bits_per_weight(device: torch.device, generator: torch.Generator) -> None:
    """Scales have 16 bits; groups that do not fill a step are padded."""
    for weight, most in (
        (grouped(256, 576, 32, 4, generator, offset=True), 5.06),
        (grouped(256, 576, 64, 4, generator), 4.31),
        (grouped(256, 576, 576, 8, generator), 8.06),
        (float8(256, 576, (128, 128), generator), 8.34),
    ):
        linear = TritonBackend().pack_quantized([there(weight, device)], None, dtype=torch.bfloat16)
        assert isinstance(linear, quantized_linear.TritonQuantizedLinear)
        assert sum(each.nbytes for each in linear.parts) * 8 <= most * 256 * 576
