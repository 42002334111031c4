"""Products for many rows: float8 (torch._scaled_mm), int8 (torch._int_mm or Triton), and 16-bit with dequantized
weights. They do not serve --deterministic, because their tiles depend on the number of rows.
"""

from __future__ import annotations

from enum import StrEnum
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.kernels.device.error_messages import describe_kernel_error
from quire.kernels.gpu.quantization import triton_quantized as kernels
from quire.kernels.gpu.quantization.activation_rounding import EightBitRounding
from quire.kernels.gpu.quantization.weight_packing import INTERLEAVED_OUTPUTS, SCALE_BLOCK, PackedWeight
from quire.kernels.gpu.triton_launch_sizes import AttentionTiles, cdiv, num_multiprocessors
from quire.kernels.quantized_tensors import RoundedActivations

_SCALE_BLOCK = 1024
DEQUANTIZED_BYTES = 128 * 2**20
"""Bytes dequantized at once. On an H100, products of many outputs gain more than staying in the L2 cache does."""
_MIN_TRITON_ROWS, _MIN_PROGRAM_SHARE = 64, 3
"""Above _MIN_TRITON_ROWS rows, Triton multiplies int8 if it has at least 1 / _MIN_PROGRAM_SHARE programs per
multiprocessor.
"""
_INT8_TILES = AttentionTiles(128, 128, 8, 3)
_INT8_STEP = 128
_TILES_TOGETHER = 8
_DIM_MULTIPLE = 16
"""The numbers of inputs and outputs must be multiples of this for _scaled_mm, and of half of it for _int_mm."""
_ROW_MULTIPLE = 4
"""With scales per 128 inputs, _scaled_mm needs a multiple of this number of rows (cuBLASLt on an H100)."""
_MAX_ERROR = 0.01
"""Relative to a float64 product of the same codes. A bfloat16 result has 8 significant bits."""
_TRIAL_SHAPES = ((17, 512, 192), (300, 1024, 128))


scaled_mm = torch._scaled_mm
"""Older PyTorch lacks the public function."""


class TorchMatmulKind(StrEnum):
    FLOAT8_ROW_SCALED = "8-bit floats, a scale for each row"
    FLOAT8_BLOCK_SCALED = "8-bit floats, scales for 128 inputs"
    INT8 = "8-bit integers"


def choose_matmul(part: PackedWeight, dtype: torch.dtype) -> TorchMatmulKind | None:
    candidate = _candidate_matmul(part)
    if candidate is None or trial_failure_reason(candidate, dtype, part.codes.device) is not None:
        return None
    return candidate


def _candidate_matmul(part: PackedWeight) -> TorchMatmulKind | None:
    if not part.rounds_activations or part.in_features % _DIM_MULTIPLE or part.out_features % _DIM_MULTIPLE:
        return None
    if part.kernel_form[0] == kernels.INTEGERS:
        return TorchMatmulKind.INT8
    if part.scales is None:
        return TorchMatmulKind.FLOAT8_ROW_SCALED
    return (
        TorchMatmulKind.FLOAT8_BLOCK_SCALED
        if part.block_scales is not None and part.block_scales.shape[1] % 4 == 0
        else None
    )


@cache
def trial_failure_reason(product: TorchMatmulKind, dtype: torch.dtype, device: torch.device) -> str | None:
    try:
        for rows, inner, outs in _TRIAL_SHAPES:
            for biased in (False, True):
                if (
                    error := _trial_relative_error(product, dtype, device, (rows, inner, outs), biased=biased)
                ) > _MAX_ERROR:
                    return f"is wrong (relative error {error:.2g})"
    except Exception as error:  # falls back to Triton's kernels
        return describe_kernel_error(error)
    return None


def _trial_relative_error(
    product: TorchMatmulKind, dtype: torch.dtype, device: torch.device, shape: tuple[int, int, int], *, biased: bool
) -> float:
    """Return inf if a result is NaN."""
    rows, inner, outs = shape
    generator = torch.Generator().manual_seed(0)
    x = torch.randn((rows, inner), generator=generator).to(device, dtype)
    codes = (torch.randn((outs, inner), generator=generator) * 50).round().clamp(-127, 127).to(device)
    factors = (torch.rand(outs, generator=generator) + 0.5).to(device)
    squares = (torch.rand((cdiv(outs, SCALE_BLOCK), cdiv(inner, SCALE_BLOCK)), generator=generator) + 0.5).to(device)
    bias = (torch.randn(outs, generator=generator) * 100).to(device, dtype) if biased else None
    scales = None
    if product == TorchMatmulKind.INT8:
        form, stored = (kernels.INTEGERS, 0, 0, False, False), codes.to(torch.int8)
        weight = stored.double() * factors[:, None].double()
    else:
        eights = codes.to(torch.float8_e4m3fn)
        form, stored = (
            (kernels.FLOATS, 0, 0, product == TorchMatmulKind.FLOAT8_BLOCK_SCALED, False),
            eights.view(torch.uint8),
        )
        by_input = squares.repeat_interleave(SCALE_BLOCK, 0)[:outs].repeat_interleave(SCALE_BLOCK, 1)[:, :inner]
        if product == TorchMatmulKind.FLOAT8_BLOCK_SCALED:
            factors, scales = (
                torch.ones_like(factors),
                squares.repeat_interleave(SCALE_BLOCK, 0)[:outs].t().contiguous(),
            )
        weight = (
            eights.double()
            * (by_input if product == TorchMatmulKind.FLOAT8_BLOCK_SCALED else factors[:, None]).double()
        )
    part = PackedWeight(
        stored, factors, scales, None, SCALE_BLOCK, form, inner, 64, outs, rounds_activations=True, block_scales=squares
    )
    rounded = EightBitRounding(
        product == TorchMatmulKind.INT8, product == TorchMatmulKind.FLOAT8_BLOCK_SCALED, pair_distance=0
    ).round_rows(x)
    spread = (
        rounded.scales.t().repeat_interleave(SCALE_BLOCK, 1)
        if product == TorchMatmulKind.FLOAT8_BLOCK_SCALED
        else rounded.scales[:, None]
    )
    codes = rounded.codes if product == TorchMatmulKind.INT8 else rounded.codes.view(torch.float8_e4m3fn)
    known = codes.double() * spread.double()
    wanted = known @ weight.t() + (0 if bias is None else bias.double())
    got = multiply_rounded(part, product, rounded, bias).double()
    error = ((got - wanted).norm() / wanted.norm()).item()
    return error if error == error else torch.inf


def multiply_rounded(
    part: PackedWeight, product: TorchMatmulKind, x: RoundedActivations, bias: Tensor | None
) -> Tensor:
    """Return x @ weight.T + bias for x [rows, in], which is rounded for `product`. int8 needs more than 16 rows."""
    if product == TorchMatmulKind.INT8:
        out = torch.empty((len(x), part.out_features), dtype=x.dtype, device=x.device)
        tiles = _INT8_TILES
        programs = cdiv(len(x), tiles.block_m) * cdiv(part.out_features, tiles.block_n)
        if len(x) > _MIN_TRITON_ROWS and _MIN_PROGRAM_SHARE * programs >= num_multiprocessors(x.device.index):
            kernels.multiply_integers[programs,](
                x.codes, x.scales, part.codes.view(torch.int8), part.factors, part.factors if bias is None else bias,
                out, len(x), part.out_features, part.in_features, bias is not None, part.in_features % _INT8_STEP == 0,
                tiles.block_m, tiles.block_n, _INT8_STEP, _TILES_TOGETHER, num_warps=tiles.num_warps,
                num_stages=tiles.num_stages,
            )  # fmt: skip
            return out
        sums = torch._int_mm(x.codes, part.codes.view(torch.int8).t())
        kernels.scale_sums[len(x), cdiv(part.out_features, _SCALE_BLOCK)](
            sums, x.scales, part.factors, part.factors if bias is None else bias, out, part.out_features,
            part.out_features, bias is not None, _SCALE_BLOCK, num_warps=4,
        )  # fmt: skip
        return out
    codes = x.codes
    scales = x.scales
    more = -len(x) % _ROW_MULTIPLE if product == TorchMatmulKind.FLOAT8_BLOCK_SCALED else 0
    if more:
        codes, scales = F.pad(codes, (0, 0, 0, more)), F.pad(scales, (0, more))
    eights, weight = codes.view(torch.float8_e4m3fn), part.codes.view(torch.float8_e4m3fn).t()
    if product == TorchMatmulKind.FLOAT8_BLOCK_SCALED:
        assert part.block_scales is not None
        scale_a, scale_b = scales.t(), part.block_scales.t()
    else:
        scale_a, scale_b = scales[:, None], part.factors[None]
    product_out = scaled_mm(eights, weight, scale_a=scale_a, scale_b=scale_b, bias=bias, out_dtype=x.dtype)
    return product_out[: len(x)]


def multiply_dequantized(
    part: PackedWeight, x: Tensor, bias: Tensor | None, out: Tensor, most_bytes: int = DEQUANTIZED_BYTES
) -> None:
    most = max(
        INTERLEAVED_OUTPUTS, most_bytes // (part.in_features * x.itemsize) // INTERLEAVED_OUTPUTS * INTERLEAVED_OUTPUTS
    )
    for first in range(0, part.out_features, most):
        count = min(most, part.out_features - first)
        weight = x.new_empty((count, part.in_features))
        kernels.dequantize_weights[cdiv(count, INTERLEAVED_OUTPUTS), cdiv(part.words_per_output, part.inputs_per_step)](
            part.codes, *part.kernel_scales_and_offsets, part.factors, weight, part.out_features, first,
            part.in_features, part.words_per_output, part.group_size, *part.kernel_form, INTERLEAVED_OUTPUTS,
            part.inputs_per_step, part.interleaved_outputs, num_warps=4,
        )  # fmt: skip
        out_columns = out[:, first : first + count]
        if bias is None:
            torch.mm(x, weight.t(), out=out_columns)
        else:
            torch.addmm(bias[first : first + count], x, weight.t(), out=out_columns)
