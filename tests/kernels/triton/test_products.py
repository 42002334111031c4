"""Which matmul serves how many rows: split-k, dequantized weights, PyTorch's 8-bit matmuls."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from quire.kernels.backend import NO_ADAPTERS, Linear
from quire.kernels.gpu.quantization import quantized_linear, torch_matmul, weight_trial
from quire.kernels.gpu.quantization.torch_matmul import TorchMatmulKind
from quire.kernels.gpu.triton_backend import TritonBackend
from quire.kernels.quantized_tensors import Float8Weight, GroupedWeight, QuantizedWeight
from tests.kernels.ragged import error
from tests.kernels.triton.few_bits import DTYPES, E2M1, FEW, TABLE, float8, grouped, rounded, there

LONG = {
    "4 bits": lambda generator: grouped(70, 1536, 32, 4, generator, offset=True),
    "4-bit floats": lambda generator: grouped(70, 1536, 32, 4, generator, values=E2M1),
    "8 bits": lambda generator: grouped(70, 1536, 64, 8, generator),
    "x in integers": lambda generator: grouped(70, 1536, 1536, 8, generator),
    "x in floats": lambda generator: float8(70, 1536, (1, 1536), generator),
}


@pytest.mark.parametrize("kind", list(LONG))
def test_few_rows_use_split_k(kind: str, device: torch.device, generator: torch.Generator) -> None:
    """The parts are added in order. A deterministic backend computes many rows with the same bits in one program."""
    weight = LONG[kind](generator)
    bias = torch.randn(70, generator=generator).bfloat16()
    x = torch.randn((66, 1536), generator=generator).bfloat16()
    expected = x.double() @ weight.dequantize().double().T + bias.double()
    linear = TritonBackend().pack_quantized([there(weight, device)], bias.to(device), dtype=x.dtype, wide=True)
    assert isinstance(linear, quantized_linear.TritonQuantizedLinear)
    count, length = quantized_linear.split_k_count_and_length(
        linear.parts[0], quantized_linear.choose_matmul_tiles(1, x.dtype, fixed=False)
    )
    assert count > 1
    assert (count - 1) * length < linear.parts[0].words_per_output <= count * length
    for rows in (1, 16):
        assert error(linear(x[:rows].to(device), NO_ADAPTERS).cpu(), expected[:rows]) < 2e-6
    fixed = TritonBackend(deterministic=True).pack_quantized([there(weight, device)], bias.to(device), dtype=x.dtype)
    whole = fixed(x.to(device), NO_ADAPTERS)
    for begin, rows in ((0, 1), (7, 3), (2, 64)):
        assert torch.equal(fixed(x[begin : begin + rows].to(device), NO_ADAPTERS), whole[begin : begin + rows])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_many_rows_with_dequantized_weights_match_float64(
    dtype: torch.dtype, device: torch.device, generator: torch.Generator
) -> None:
    """Weights are dequantized in slices of outputs, also if a linear mixes formats."""
    weights = [
        grouped(70, 192, 32, 4, generator, offset=True),
        grouped(130, 192, 64, 4, generator, values=TABLE),
        grouped(20, 192, 64, 8, generator, ordered=True),
        float8(50, 192, (50, 64), generator),
        float8(20, 192, (1, 32), generator),
    ]
    x, bias = (torch.randn(shape, generator=generator).to(dtype) for shape in ((256, 192), (290,)))
    whole = torch.cat([each.dequantize() for each in weights]).double()
    for given in (None, bias):
        there_bias = None if given is None else given.to(device)
        linear = TritonBackend().pack_quantized([there(each, device) for each in weights], there_bias, dtype=dtype)
        assert isinstance(linear, quantized_linear.TritonQuantizedLinear)
        linear.dequantized_bytes = 64 * 192 * 2
        expected = x.double() @ whole.T + (0 if given is None else given.double())
        assert error(linear(x.to(device), NO_ADAPTERS).cpu(), expected) < 2 * DTYPES[dtype]


BY_PYTORCH = {
    TorchMatmulKind.INT8: lambda generator: grouped(64, 512, 512, 8, generator),
    TorchMatmulKind.FLOAT8_ROW_SCALED: lambda generator: float8(64, 512, (1, 512), generator),
    TorchMatmulKind.FLOAT8_BLOCK_SCALED: lambda generator: float8(64, 512, (128, 128), generator),
}


def scaled_mm(a: Tensor, b: Tensor, *, scale_a: Tensor, scale_b: Tensor, bias: Tensor | None, out_dtype: torch.dtype):
    """torch._scaled_mm in float64, with the checks of its GPU implementation
    (aten/src/ATen/native/cuda/ScaledBlas.cpp).
    """
    (rows, inner), outs = a.shape, b.shape[1]
    assert a.stride() == (inner, 1)
    assert b.stride() == (1, inner), "column by column"
    assert inner % 16 == 0
    assert outs % 16 == 0
    assert a.dtype == b.dtype == torch.float8_e4m3fn
    assert scale_a.dtype == scale_b.dtype == torch.float32
    if scale_a.shape == (rows, 1):
        assert scale_b.shape == (1, outs)
        assert scale_a.is_contiguous()
        assert scale_b.is_contiguous()
        left, right = a.double() * scale_a.double(), b.double() * scale_b.double()
    else:
        blocks = -(-inner // 128)
        assert rows % 4 == 0, "an H100's cuBLASLt refuses others"
        assert scale_a.shape == (rows, blocks)
        assert scale_a.stride() == (1, rows)
        assert scale_b.t().shape == (-(-outs // 128), blocks)
        assert scale_b.t().is_contiguous()
        assert blocks % 4 == 0
        left = a.double() * scale_a.double().repeat_interleave(128, 1)[:, :inner]
        right = b.double() * scale_b.double().repeat_interleave(128, 0)[:inner].repeat_interleave(128, 1)[:, :outs]
    out = left @ right
    return (out if bias is None else out + bias.double()).to(out_dtype)


@pytest.fixture
def _tried_again() -> Iterator[None]:
    """Clears the cached result of a trial."""
    torch_matmul.trial_failure_reason.cache_clear()
    yield
    torch_matmul.trial_failure_reason.cache_clear()


@pytest.mark.usefixtures("_tried_again")
@pytest.mark.parametrize("product", list(TorchMatmulKind))
def test_pytorch_matmul_serves_more_than_16_rows(
    product: TorchMatmulKind, device: torch.device, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Used from 17 rows on if the trial passes."""
    if device.type == "cpu" and product == TorchMatmulKind.FLOAT8_BLOCK_SCALED:  # PyTorch has it on Hopper only
        monkeypatch.setattr(torch_matmul, "scaled_mm", scaled_mm)
    if (reason := torch_matmul.trial_failure_reason(product, torch.bfloat16, device)) is not None:
        assert device.type == "cuda", reason
        pytest.skip(reason)
    calls, multiply = list[TorchMatmulKind](), torch_matmul.multiply_rounded
    monkeypatch.setattr(
        torch_matmul, "multiply_rounded", lambda part, by, *rest: calls.append(by) or multiply(part, by, *rest)
    )
    weight, bias = BY_PYTORCH[product](generator), torch.randn(64, generator=generator).bfloat16() * 100
    linear = TritonBackend().pack_quantized([there(weight, device)], bias.to(device), dtype=torch.bfloat16)
    calls.clear()  # drop the calls of a GPU's trial
    for rows in (1, 16, 17, 40):
        x = torch.randn((rows, 512), generator=generator).bfloat16()
        block = 128 if product == TorchMatmulKind.FLOAT8_BLOCK_SCALED else 512
        seen = rounded(x, floats=product != TorchMatmulKind.INT8, block=block) if rows > FEW else x.double()
        expected = seen @ weight.dequantize().double().T + bias.double()
        assert error(linear(x.to(device), NO_ADAPTERS).cpu(), expected) < DTYPES[torch.bfloat16]
    assert calls == [product, product]
    x[3, 7] = torch.nan
    got = linear(x.to(device), NO_ADAPTERS).cpu()
    assert got[3].isnan().all()
    assert torch.cat((got[:3], got[4:])).isfinite().all()
    for others in ({"wide": True}, {}):
        backend = TritonBackend(deterministic=not others)
        backend.pack_quantized([there(weight, device)], None, dtype=torch.bfloat16, **others)(
            x[:17].to(device), NO_ADAPTERS
        )
    assert len(calls) == 3, "neither a head's nor deterministic"


def scaled_mm_3_percent_off(*args: Any, **named: Any) -> Tensor:
    return scaled_mm(*args, **named) * 1.03


def scaled_mm_unsupported(*_: Any, **__: Any) -> Tensor:
    raise RuntimeError("torch._scaled_mm is only supported on CUDA devices with compute capability >= 8.9")


def scaled_mm_without_bias(*args: Any, **named: Any) -> Tensor:
    return scaled_mm(*args, **(named | {"bias": None}))


def none(*args: Any, **named: Any) -> Tensor:
    return scaled_mm(*args, **named) * torch.nan


@pytest.mark.usefixtures("_tried_again")
@pytest.mark.parametrize("fault", [scaled_mm_3_percent_off, scaled_mm_unsupported, scaled_mm_without_bias, none])
def test_pytorch_matmul_that_fails_trial_is_not_used(
    fault: Any, device: torch.device, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_matmul, "scaled_mm", fault)
    assert torch_matmul.trial_failure_reason(TorchMatmulKind.FLOAT8_ROW_SCALED, torch.bfloat16, device) is not None
    weight = there(BY_PYTORCH[TorchMatmulKind.FLOAT8_ROW_SCALED](generator), device)
    linear = TritonBackend().pack_quantized([weight], None, dtype=torch.bfloat16)
    x = torch.randn((20, 512), generator=generator).bfloat16()
    expected = rounded(x, floats=True) @ weight.dequantize().double().cpu().T
    assert error(linear(x.to(device), NO_ADAPTERS).cpu(), expected) < DTYPES[torch.bfloat16]


KINDS = {
    "4 bits": GroupedWeight(torch.zeros((64, 64), dtype=torch.uint8), torch.ones((64, 4)), torch.ones((64, 4))),
    "MXFP4": GroupedWeight(torch.zeros((64, 64), dtype=torch.uint8), torch.ones((64, 4)), None, E2M1),
    "8 bits": GroupedWeight(torch.zeros((64, 128), dtype=torch.int8), torch.ones((64, 1))),
    "FP8": Float8Weight(torch.zeros((64, 128)).to(torch.float8_e4m3fn), torch.ones((64, 1)), (1, 128)),
    "squares": Float8Weight(torch.zeros((256, 256)).to(torch.float8_e4m3fn), torch.ones((2, 2)), (128, 128)),
}


@pytest.mark.parametrize("weight", KINDS.values(), ids=list(KINDS))
def test_weight_trial_detects_wrong_results_and_errors(weight: QuantizedWeight, device: torch.device) -> None:
    """The trial passes correct results and detects a scale that is 5 % off for many rows only."""
    kind = weight_trial.quantized_format(weight)

    def found(pack: Any) -> str | None:
        weight_trial.trial_failure_reason.cache_clear()
        return weight_trial.trial_failure_reason(kind, torch.bfloat16, device, False, False, pack, (3, 40))

    def scaled_mm_3_percent_off(*args: Any, **named: Any) -> Linear:
        linear = quantized_linear.pack_without_trial(*args, **named)
        assert linear is not None
        return lambda x, context: linear(x, context) * (1.05 if len(x) > FEW else 1.0)

    assert found(quantized_linear.pack_without_trial) is None
    assert "is wrong for 40 rows" in str(found(scaled_mm_3_percent_off))
    assert str(found(scaled_mm_unsupported)).startswith("RuntimeError: torch._scaled_mm is only supported")
    assert found(lambda *_, **__: None) is None
    weight_trial.trial_failure_reason.cache_clear()
