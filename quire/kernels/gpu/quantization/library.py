"""Products for many rows: PyTorch's of 8-bit floats (torch._scaled_mm) and of weights that are expanded to 16 bits
first, some at a time; of 8-bit integers PyTorch's (torch._int_mm), then Triton's. What a build computes on a GPU a
trial on that GPU says.

Their tiles follow the number of rows, so they are not for --deterministic.
"""

from __future__ import annotations

from enum import StrEnum
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.kernels.gpu.faults import fault
from quire.kernels.gpu.quantization import triton_quantized as kernels
from quire.kernels.gpu.quantization.packing import BLOCK, LINES, Packed
from quire.kernels.gpu.quantization.rounding import Eights
from quire.kernels.gpu.triton_sizes import Tiles, cdiv, processors
from quire.kernels.quantized import Rounded

_COLUMNS = 1024
"""Outputs that one program scales."""
EXPANDED_BYTES = 128 * 2**20
"""Of weights that are expanded at a time: an H100 gains more by a product of many outputs than by its second cache."""
_MANY, _LEAST_SHARE = 64, 3
"""Rows above which integers are multiplied by Triton, whose product scales its sums by itself, where programs are for
one in so many of the GPU's processors at least."""
_INTEGER_TILES, _INTEGER_STEP, _TOGETHER = Tiles(128, 128, 8, 3), 128, 8
_UNIT = 16
"""_scaled_mm takes inputs and outputs in multiples of it; _int_mm of half as many."""
_ROWS = 4
"""Where 128 inputs share a scale, _scaled_mm takes rows in multiples of it: so cuBLASLt on an H100."""
_MOST_ERROR = 0.01
"""Of a product, relative, beside the same codes in float64: its type has 8 bits."""
_TRIED = ((17, 512, 192), (300, 1024, 128))
"""Rows, inputs, outputs."""


scaled_mm = torch._scaled_mm
"""PyTorch's product of 8-bit floats, whose public form older versions lack."""


class Product(StrEnum):
    """What PyTorch multiplies, and how x is scaled."""

    FLOATS = "8-bit floats, a scale for each row"
    SQUARES = "8-bit floats, scales for 128 inputs"
    INTEGERS = "8-bit integers"


def product_of(part: Packed, dtype: torch.dtype) -> Product | None:
    """By which one of PyTorch's products x of this type is multiplied, if it is; the trial has passed there."""
    found = _fitting(part)
    if found is None or why_not(found, dtype, part.codes.device) is not None:
        return None
    return found


def _fitting(part: Packed) -> Product | None:
    if not part.rounds or part.inner % _UNIT or part.outs % _UNIT:
        return None
    if part.form[0] == kernels.INTEGERS:
        return Product.INTEGERS
    if part.scales is None:
        return Product.FLOATS
    return Product.SQUARES if part.squares is not None and part.squares.shape[1] % 4 == 0 else None


@cache
def why_not(product: Product, dtype: torch.dtype, device: torch.device) -> str | None:
    """Why the product is not PyTorch's for x of this type on the device, in one sentence; None: it computed right."""
    try:
        for rows, inner, outs in _TRIED:
            for biased in (False, True):
                if (error := _tried(product, dtype, device, (rows, inner, outs), biased=biased)) > _MOST_ERROR:
                    return f"computes something else (relative error {error:.2g})"
    except Exception as error:  # whatever it says, Triton's kernels compute instead
        return fault(error)
    return None


def _tried(
    product: Product, dtype: torch.dtype, device: torch.device, shape: tuple[int, int, int], *, biased: bool
) -> float:
    """The relative error of a case; inf where something is no number."""
    rows, inner, outs = shape
    generator = torch.Generator().manual_seed(0)
    x = torch.randn((rows, inner), generator=generator).to(device, dtype)
    codes = (torch.randn((outs, inner), generator=generator) * 50).round().clamp(-127, 127).to(device)
    factors = (torch.rand(outs, generator=generator) + 0.5).to(device)
    squares = (torch.rand((cdiv(outs, BLOCK), cdiv(inner, BLOCK)), generator=generator) + 0.5).to(device)
    bias = (torch.randn(outs, generator=generator) * 100).to(device, dtype) if biased else None
    scales = None
    if product == Product.INTEGERS:
        form, held = (kernels.INTEGERS, 0, 0, False, False), codes.to(torch.int8)
        weight = held.double() * factors[:, None].double()
    else:
        eights = codes.to(torch.float8_e4m3fn)
        form, held = (kernels.FLOATS, 0, 0, product == Product.SQUARES, False), eights.view(torch.uint8)
        by_input = squares.repeat_interleave(BLOCK, 0)[:outs].repeat_interleave(BLOCK, 1)[:, :inner]
        if product == Product.SQUARES:
            factors, scales = torch.ones_like(factors), squares.repeat_interleave(BLOCK, 0)[:outs].t().contiguous()
        weight = eights.double() * (by_input if product == Product.SQUARES else factors[:, None]).double()
    part = Packed(held, factors, scales, None, BLOCK, form, inner, 64, outs, rounds=True, squares=squares)
    seen = Eights(product == Product.INTEGERS, product == Product.SQUARES, paired=0).of(x)
    spread = seen.scales.t().repeat_interleave(BLOCK, 1) if product == Product.SQUARES else seen.scales[:, None]
    codes = seen.codes if product == Product.INTEGERS else seen.codes.view(torch.float8_e4m3fn)
    known = codes.double() * spread.double()
    wanted = known @ weight.t() + (0 if bias is None else bias.double())
    got = multiply(part, product, seen, bias).double()
    error = ((got - wanted).norm() / wanted.norm()).item()
    return error if error == error else torch.inf


def multiply(part: Packed, product: Product, x: Rounded, bias: Tensor | None) -> Tensor:
    """x [rows, in], as the product takes it, @ weight.T + bias; integers of more than 16 rows."""
    if product == Product.INTEGERS:
        out = torch.empty((len(x), part.outs), dtype=x.dtype, device=x.device)
        tiles = _INTEGER_TILES
        programs = cdiv(len(x), tiles.block_m) * cdiv(part.outs, tiles.block_n)
        if len(x) > _MANY and _LEAST_SHARE * programs >= processors(x.device.index):
            kernels.multiply_integers[programs,](
                x.codes, x.scales, part.codes.view(torch.int8), part.factors, part.factors if bias is None else bias,
                out, len(x), part.outs, part.inner, bias is not None, part.inner % _INTEGER_STEP == 0, tiles.block_m,
                tiles.block_n, _INTEGER_STEP, _TOGETHER, num_warps=tiles.num_warps, num_stages=tiles.num_stages,
            )  # fmt: skip
            return out
        sums = torch._int_mm(x.codes, part.codes.view(torch.int8).t())
        kernels.scale_sums[len(x), cdiv(part.outs, _COLUMNS)](
            sums, x.scales, part.factors, part.factors if bias is None else bias, out, part.outs, part.outs,
            bias is not None, _COLUMNS, num_warps=4,
        )  # fmt: skip
        return out
    codes, scales, more = x.codes, x.scales, -len(x) % _ROWS if product == Product.SQUARES else 0
    if more:
        codes, scales = F.pad(codes, (0, 0, 0, more)), F.pad(scales, (0, more))
    eights, weight = codes.view(torch.float8_e4m3fn), part.codes.view(torch.float8_e4m3fn).t()
    if product == Product.SQUARES:
        assert part.squares is not None
        scale_a, scale_b = scales.t(), part.squares.t()
    else:
        scale_a, scale_b = scales[:, None], part.factors[None]
    made = scaled_mm(eights, weight, scale_a=scale_a, scale_b=scale_b, bias=bias, out_dtype=x.dtype)
    return made[: len(x)]


def multiply_expanded(
    part: Packed, x: Tensor, bias: Tensor | None, out: Tensor, most_bytes: int = EXPANDED_BYTES
) -> None:
    """x [rows, in] @ weight.T + bias to out, some columns of a wider tensor of the type of x, which has 16 bits: the
    weights become numbers of that type first, up to `most_bytes` of them at a time."""
    most = max(LINES, most_bytes // (part.inner * x.itemsize) // LINES * LINES)
    for first in range(0, part.outs, most):
        count = min(most, part.outs - first)
        weight = x.new_empty((count, part.inner))
        kernels.expand[cdiv(count, LINES), cdiv(part.stride, part.step)](
            part.codes, *part.kernel_scales, part.factors, weight, part.outs, first, part.inner, part.stride,
            part.group, *part.form, LINES, part.step, part.lines, num_warps=4,
        )  # fmt: skip
        given = out[:, first : first + count]
        if bias is None:
            torch.mm(x, weight.t(), out=given)
        else:
            torch.addmm(bias[first : first + count], x, weight.t(), out=given)
