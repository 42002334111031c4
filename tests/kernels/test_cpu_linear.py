"""Packed linears of the CPU backend: close to float64, and the same bits for a row in every batch."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from quire.kernels.backend import NO_ADAPTERS
from quire.kernels.cpu.backend import CpuBackend
from quire.kernels.cpu.linear import PackedLinear
from quire.kernels.reference import ReferenceBackend
from tests.kernels.ragged import assert_rows_equal_whole, error

SHAPES = [(2, 1), (30, 17), (64, 64), (256, 130), (704, 256), (1536, 65)]

COMPRESS = ("avx512_bf16", "avx512_amx")
"""Instruction sets that read compressed weights."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("inner", "outs"), SHAPES)
def test_packed_linear_matches_float64(
    cpu: CpuBackend, inner: int, outs: int, biased: bool, dtype: torch.dtype, generator: torch.Generator
) -> None:
    weight, bias = (torch.randn(s, generator=generator).to(dtype) for s in ((outs, inner), (outs,)))
    linear = cpu.pack_linear(weight, bias if biased else None)
    for rows in (0, 1, 2, 5, 6, 7, 33, 200):
        x = torch.randn((rows, inner), generator=generator).to(dtype)
        got = linear(x, NO_ADAPTERS)
        assert got.shape == (rows, outs)
        expected = F.linear(x.double(), weight.double(), bias.double() if biased else None)
        assert rows == 0 or error(got, expected) < (5e-3 if dtype == torch.bfloat16 else 2e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_linear_works_without_onednn(cpu: CpuBackend, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch for Apple's CPUs lacks these operators."""
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    monkeypatch.setattr(torch.ops, "mkldnn", None)
    x, weight = torch.ones((3, 8), dtype=dtype), torch.eye(8, dtype=dtype)
    assert isinstance(cpu.pack_linear(weight, None), PackedLinear)
    assert torch.equal(ReferenceBackend().pack_linear(weight, None)(x, NO_ADAPTERS), x)


def test_linear_rounds_exact_sum_once(cpu: CpuBackend, generator: torch.Generator) -> None:
    """Integers whose sums float32 holds exactly: the result must be the exact sum, rounded once."""
    x, weight = (torch.randint(-8, 9, s, generator=generator).bfloat16() for s in ((9, 300), (70, 300)))
    assert torch.equal(cpu.pack_linear(weight, None)(x, NO_ADAPTERS), F.linear(x.double(), weight.double()).bfloat16())


def test_wide_linear_returns_float32_sums_before_rounding(cpu: CpuBackend, generator: torch.Generator) -> None:
    x, weight, bias = (torch.randn(s, generator=generator).bfloat16() for s in ((9, 300), (70, 300), (70,)))
    wide = cpu.pack_linear(weight, bias, wide=True)(x, NO_ADAPTERS)
    assert wide.dtype == torch.float32
    assert torch.equal(wide.bfloat16(), cpu.pack_linear(weight, bias)(x, NO_ADAPTERS))
    assert error(wide, F.linear(x.double(), weight.double(), bias.double())) < 2e-6


@pytest.mark.parametrize("size", [1, 7, 16, 17, 511, 512, 513, 5000])
def test_argmax_returns_first_of_equal_maxima(cpu: CpuBackend, size: int, generator: torch.Generator) -> None:
    logits = torch.randint(-50, 50, (33, size), generator=generator).float()  # many ties
    logits[3] = -torch.inf
    logits[4, size // 2] = torch.inf
    logits[5] = -5.0
    expected = (logits == logits.amax(-1, keepdim=True)).int().argmax(-1)
    assert torch.equal(cpu.argmax(logits), expected)
    assert torch.equal(cpu.argmax(logits[7:8]), expected[7:8])


@pytest.mark.usefixtures("keep_threads")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("inner", "outs"), [(256, 512), (576, 200), (576, 320)])
def test_linear_row_bits_do_not_depend_on_batch_or_threads(
    cpu: CpuBackend, inner: int, outs: int, dtype: torch.dtype, generator: torch.Generator
) -> None:
    weight, bias = (torch.randn(s, generator=generator).to(dtype) for s in ((outs, inner), (outs,)))
    linear = cpu.pack_linear(weight, bias)
    x = torch.randn((400, inner), generator=generator).to(dtype)
    assert_rows_equal_whole(linear, x)


def _outliers(kind: str, generator: torch.Generator) -> torch.Tensor:
    """[200, 96]: a matrix with a wide range of exponents."""
    weight = torch.randn((200, 96), generator=generator)
    match kind:
        case "normal":
            pass
        case "tiny and huge":
            weight[::9, ::17] *= 2.0**-60
            weight[5, ::31] *= 2.0**90
        case "zeros":
            weight[:, 3::5] = 0.0
            weight[7] = -0.0
        case "subnormal, infinite, not a number":
            weight[0, :4] = torch.tensor([1e-40, torch.inf, -torch.inf, torch.nan])
        case "any bits":
            return torch.randint(-(2**15), 2**15, (200, 96), dtype=torch.int16, generator=generator).view(
                torch.bfloat16
            )
    return weight.bfloat16()


@pytest.mark.parametrize("kind", ["normal", "tiny and huge", "zeros", "subnormal, infinite, not a number", "any bits"])
@pytest.mark.parametrize("wide", [False, True])
def test_compressed_weights_give_same_bits(
    cpu: CpuBackend, kind: str, wide: bool, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight, bias = _outliers(kind, generator), torch.randn(200, generator=generator).bfloat16()
    compressed = cpu.pack_linear(weight, bias, wide=wide)
    assert isinstance(compressed, PackedLinear)
    assert bool(compressed.native.compressed) == (
        cpu.library.isa in COMPRESS and kind not in ("tiny and huge", "any bits")
    )
    monkeypatch.setattr(cpu.library, "compressed_size", lambda *_: 0)
    plain = cpu.pack_linear(weight, bias, wide=wide)
    for rows in (1, 5, 6, 7, 12, 13, 33, 200):
        x = torch.randn((rows, 96), generator=generator).bfloat16()
        bits = torch.int32 if wide else torch.int16
        assert torch.equal(compressed(x, NO_ADAPTERS).view(bits), plain(x, NO_ADAPTERS).view(bits)), rows


def test_compressed_weights_keep_outlier_exponents_exact(cpu: CpuBackend, generator: torch.Generator) -> None:
    weight = torch.randn((130, 640), generator=generator).bfloat16()
    weight[3, ::200] *= 2.0**-70
    weight[129, 639] = 2.0**100
    linear = cpu.pack_linear(weight, None)
    assert isinstance(linear, PackedLinear)
    assert bool(linear.native.compressed) == (cpu.library.isa in COMPRESS)
    assert error(linear(torch.eye(640).bfloat16(), NO_ADAPTERS), weight.double().T) == 0.0


def test_packed_linear_does_not_read_original_weight(cpu: CpuBackend, generator: torch.Generator) -> None:
    weight, bias = (torch.randn(s, generator=generator).bfloat16() for s in ((100, 64), (100,)))
    x = torch.ones((3, 64), dtype=torch.bfloat16)
    linear = cpu.pack_linear(weight, bias)
    before = linear(x, NO_ADAPTERS)
    weight.zero_()
    assert torch.equal(linear(x, NO_ADAPTERS), before)


def test_linear_raises_type_error_for_wrong_shape_or_dtype(cpu: CpuBackend) -> None:
    linear = cpu.pack_linear(torch.ones((8, 6), dtype=torch.bfloat16), None)
    with pytest.raises(TypeError, match="from 6 to 8"):
        linear(torch.ones((2, 4), dtype=torch.bfloat16), NO_ADAPTERS)
    with pytest.raises(TypeError, match="float32"):
        linear(torch.ones((2, 6)), NO_ADAPTERS)
