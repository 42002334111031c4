"""Tries each quantized format before packing its first weight, because only a trial shows whether kernels are right
with this compiler and GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import torch

from quire.kernels.backend import NO_ADAPTERS, Linear
from quire.kernels.device.error_messages import describe_kernel_error
from quire.kernels.quantized_tensors import Float8Weight, GroupedWeight, QuantizedWeight

_ROW_COUNTS = (3, 40, 300)
_NUM_OUTPUTS, _MIN_INPUTS = 192, 1024
_MAX_INTEGER_ERROR, _MAX_FLOAT_ERROR = 0.02, 0.04
"""Maximum relative errors, because x may be rounded to 8 bits. A float8 significand has only 4 bits."""


class QuantizedFormat(NamedTuple):
    bits: int
    """Bits of integer codes, or 0 for float8."""
    code_values: tuple[int, ...] | None
    scale_block: tuple[int, int]
    """(outputs, inputs) per scale, where 0 means all."""
    has_offsets: bool


PackFunction = Callable[..., Linear | None]


def quantized_format(weight: QuantizedWeight) -> QuantizedFormat:
    outs, inner = weight.shape
    if isinstance(weight, Float8Weight):
        return QuantizedFormat(
            0,
            None,
            (
                0 if weight.scale_block[0] >= outs else weight.scale_block[0],
                _inputs_per_scale(weight.inputs_per_scale, inner),
            ),
            False,
        )
    return QuantizedFormat(
        weight.bits, weight.code_values, (1, _inputs_per_scale(weight.group_size, inner)), weight.offsets is not None
    )


def _inputs_per_scale(inputs: int, inner: int) -> int:
    return 0 if inputs >= inner else inputs


@cache
def trial_failure_reason(
    kind: QuantizedFormat,
    dtype: torch.dtype,
    device: torch.device,
    wide: bool,
    fixed: bool,
    pack: PackFunction,
    counts: tuple[int, ...] = _ROW_COUNTS,
) -> str | None:
    try:
        generator = torch.Generator().manual_seed(0)
        weight = _random_weight(kind, device, generator)
        linear = pack([weight], None, dtype=dtype, wide=wide, fixed=fixed)
        if linear is None:
            return None
        whole = weight.dequantize().double().t()
        for rows in counts:
            x = torch.randn((rows, len(whole)), generator=generator).to(device, dtype)
            wanted = x.double() @ whole
            error = ((linear(x, NO_ADAPTERS).double() - wanted).norm() / wanted.norm()).item()
            if not error < (_MAX_INTEGER_ERROR if kind.bits else _MAX_FLOAT_ERROR):
                return f"{kind} is wrong for {rows} rows (relative error {error:.2g})"
    except Exception as error:  # falls back to plain PyTorch
        return describe_kernel_error(error)
    return None


def _random_weight(kind: QuantizedFormat, device: torch.device, generator: torch.Generator) -> QuantizedWeight:
    out_block, inputs = kind.scale_block[0] or _NUM_OUTPUTS, kind.scale_block[1] or _MIN_INPUTS
    inner = -(-_MIN_INPUTS // inputs) * inputs

    def random_scales(*shape: int) -> torch.Tensor:
        return (torch.rand(shape, generator=generator) * 0.01 + 0.001).to(device)

    if kind.bits == 0:
        eights = (torch.randn((_NUM_OUTPUTS, inner), generator=generator) * 0.5).to(torch.float8_e4m3fn).to(device)
        return Float8Weight(eights, random_scales(-(-_NUM_OUTPUTS // out_block), inner // inputs), (out_block, inputs))
    if kind.bits == 8:
        codes = torch.randint(-127, 128, (_NUM_OUTPUTS, inner), dtype=torch.int8, generator=generator)
    else:
        codes = torch.randint(0, 256, (_NUM_OUTPUTS, inner // 2), dtype=torch.uint8, generator=generator)
    groups = (_NUM_OUTPUTS, inner // inputs)
    return GroupedWeight(
        codes.to(device), random_scales(*groups), random_scales(*groups) if kind.has_offsets else None, kind.code_values
    )
