"""Each kind of weights of few bits is tried on the GPU before the first of them is packed, for few, some and many rows:
what another compiler or another card makes of the kernels shows nowhere else."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import torch

from quire.kernels.backend import NO_ADAPTERS, Linear
from quire.kernels.gpu.faults import fault
from quire.kernels.quantized import Float8Weight, GroupedWeight, QuantizedWeight

_ROWS = (3, 40, 300)
_OUTS, _INNER = 192, 1024
"""Of the weights that are tried; the latter at least, in whole groups."""
_MOST_ERROR, _MOST_OF_FLOATS = 0.02, 0.04
"""Relative, of a product in which x may be rounded to 8 bits: a float has 4 of them."""


class Kind(NamedTuple):
    """By what weights are computed otherwise."""

    bits: int
    """Of integers; 0: 8-bit floats."""
    values: tuple[int, ...] | None
    block: tuple[int, int]
    """Outputs and inputs that share a scale; 0: all."""
    offsets: bool


Pack = Callable[..., Linear | None]
"""Packs without a trial, as `made` of quantized.py does."""


def kind_of(weight: QuantizedWeight) -> Kind:
    outs, inner = weight.shape
    if isinstance(weight, Float8Weight):
        return Kind(0, None, (0 if weight.block[0] >= outs else weight.block[0], _shared(weight.inputs, inner)), False)
    return Kind(weight.bits, weight.values, (1, _shared(weight.group, inner)), weight.offsets is not None)


def _shared(inputs: int, inner: int) -> int:
    return 0 if inputs >= inner else inputs


@cache
def why_not(
    kind: Kind,
    dtype: torch.dtype,
    device: torch.device,
    wide: bool,
    fixed: bool,
    pack: Pack,
    counts: tuple[int, ...] = _ROWS,
) -> str | None:
    """Why such weights are not multiplied as they are packed, in one sentence; None: they come out right, or the
    kernels do not know them, which their packing says. counts: of rows that are multiplied."""
    try:
        generator = torch.Generator().manual_seed(0)
        weight = _sample(kind, device, generator)
        linear = pack([weight], None, dtype=dtype, wide=wide, fixed=fixed)
        if linear is None:
            return None
        whole = weight.dequantized().double().t()
        for rows in counts:
            x = torch.randn((rows, len(whole)), generator=generator).to(device, dtype)
            wanted = x.double() @ whole
            error = ((linear(x, NO_ADAPTERS).double() - wanted).norm() / wanted.norm()).item()
            if not error < (_MOST_ERROR if kind.bits else _MOST_OF_FLOATS):
                return f"{kind} computes something else for {rows} rows (relative error {error:.2g})"
    except Exception as error:  # whatever it says, plain PyTorch computes instead
        return fault(error)
    return None


def _sample(kind: Kind, device: torch.device, generator: torch.Generator) -> QuantizedWeight:
    out_block, inputs = kind.block[0] or _OUTS, kind.block[1] or _INNER
    inner = -(-_INNER // inputs) * inputs

    def some(*shape: int) -> torch.Tensor:
        return (torch.rand(shape, generator=generator) * 0.01 + 0.001).to(device)

    if kind.bits == 0:
        eights = (torch.randn((_OUTS, inner), generator=generator) * 0.5).to(torch.float8_e4m3fn).to(device)
        return Float8Weight(eights, some(-(-_OUTS // out_block), inner // inputs), (out_block, inputs))
    if kind.bits == 8:
        codes = torch.randint(-127, 128, (_OUTS, inner), dtype=torch.int8, generator=generator)
    else:
        codes = torch.randint(0, 256, (_OUTS, inner // 2), dtype=torch.uint8, generator=generator)
    groups = (_OUTS, inner // inputs)
    return GroupedWeight(codes.to(device), some(*groups), some(*groups) if kind.offsets else None, kind.values)
