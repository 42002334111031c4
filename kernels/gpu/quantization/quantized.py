"""Linears and tables of quantized weights on a GPU, by the kernels of triton_quantized.py and by PyTorch's products."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from quire.kernels.backend import LinearContext, Table
from quire.kernels.gpu import triton_sizes
from quire.kernels.gpu.quantization import library, trial
from quire.kernels.gpu.quantization import triton_quantized as kernels
from quire.kernels.gpu.quantization.packing import (
    BLOCK,
    Packed,
    joined,
    laid_for_decodes,
    pack_float8,
    pack_grouped,
)
from quire.kernels.gpu.triton_sizes import cdiv
from quire.kernels.quantized import Float8Weight, QuantizedWeight

log = logging.getLogger("quire.kernels")

_FEW, _SOME = 16, 64
"""Rows: tiles are chosen for up to so many."""
_EXPANDED = 256
"""Rows from which on weights that x is not rounded for are expanded once, for PyTorch's product of 16 bits."""
_COLUMNS = 1024
"""Of a row that is looked up, or of sums, in one program."""
_PROGRAMS = 4
"""For each multiprocessor, so that memory is never waited for."""
_LEAST_STEPS = 4
"""Of a part of the inner dimension."""


class QuantizedLinear:
    """Weights of one input, their outputs side by side. Memory: `parts`."""

    def __init__(
        self,
        parts: Sequence[Packed],
        bias: Tensor | None,
        *,
        wide: bool,
        fixed: bool,
        products: Sequence[library.Product | None] = (),
    ) -> None:
        """fixed: a row has the same bits in every batch. wide: the result is float32. products: by part, by which of
        PyTorch's many rows are multiplied; (): by none."""
        self.parts = parts
        self._products = products or [None] * len(parts)
        self.bias = bias
        self.wide = wide
        self._fixed = fixed
        self._outs = sum(each.outs for each in parts)

    @property
    def movable(self) -> list[Tensor]:
        """As kernels/streaming/from_host.py has it: what is large."""
        large = [tensor for each in self.parts for tensor in (each.codes, each.scales, each.offsets)]
        return [each for each in large if each is not None]

    def __call__(self, x: Tensor, context: LinearContext) -> Tensor:
        x = x.contiguous()
        dtype = torch.float32 if self.wide else x.dtype
        if len(self.parts) == 1 and len(x):
            return self._multiply(0, x, self.bias, dtype)
        out = x.new_empty((len(x), self._outs), dtype=dtype)
        first = 0
        for number, part in enumerate(self.parts if len(x) else ()):
            end = first + part.outs
            bias = None if self.bias is None else self.bias[first:end]
            self._multiply(number, x, bias, dtype, out[:, first:end])
            first = end
        return out

    def _multiply(
        self, number: int, x: Tensor, bias: Tensor | None, dtype: torch.dtype, out: Tensor | None = None
    ) -> Tensor:
        """x @ part.T + bias of this type, to `out`, some columns of a wider tensor, where it is given."""
        part, product = self.parts[number], self._products[number]
        x = x if part.order is None else x.index_select(1, part.order)
        many = not self._fixed and not self.wide and len(x) > _FEW
        if many and product is not None:
            made = library.multiply(part, product, x, bias)
            return made if out is None else out.copy_(made)
        out = x.new_empty((len(x), part.outs), dtype=dtype) if out is None else out
        # Few rows are not rounded: the weights alone are small then, and the time is that of reading them.
        if part.rounds and (self._fixed or len(x) > _FEW):
            _multiply_codes(part, x, bias, out, self._fixed)
        elif many and len(x) >= _EXPANDED and x.dtype != torch.float32:
            library.multiply_expanded(part, x, bias, out)
        else:
            multiply_whole(part, x, bias, out, fixed=self._fixed)
        return out


def pack_quantized(
    weights: Sequence[QuantizedWeight], bias: Tensor | None, *, dtype: torch.dtype, wide: bool, fixed: bool
) -> QuantizedLinear | None:
    """As `Backend.pack_quantized`; None where the kernels do not know a form, or compute something else for it on this
    GPU. fixed: as in QuantizedLinear."""
    if weights[0].codes.is_cuda:
        where = (dtype, weights[0].codes.device, wide, fixed)
        for weight in weights:
            if (reason := trial.why_not(trial.kind_of(weight), *where, made)) is not None:
                log.warning("weights of few bits are held in %s: Triton's kernels: %s", dtype, reason)
                return None
    return made(weights, bias, dtype=dtype, wide=wide, fixed=fixed)


def made(
    weights: Sequence[QuantizedWeight], bias: Tensor | None, *, dtype: torch.dtype, wide: bool, fixed: bool
) -> QuantizedLinear | None:
    """The same without a trial."""
    parts: list[Packed] = []
    for weight in weights:
        if isinstance(weight, Float8Weight):
            made = pack_float8(weight, native=has_float8(weight.codes))
        else:
            made = pack_grouped(weight)
        if made is None:
            return None
        parts.append(made)
    parts = [laid_for_decodes(each) for each in joined(parts)]
    products = [None if fixed or wide else library.product_of(each, dtype) for each in parts]
    return QuantizedLinear(parts, bias, wide=wide, fixed=fixed, products=products)


def pack_table(weight: QuantizedWeight, *, dtype: torch.dtype, tied: bool, fixed: bool) -> Table | None:
    """As `Backend.pack_table`, likewise."""
    linear = pack_quantized([weight], None, dtype=dtype, wide=True, fixed=fixed)
    if linear is None or linear.parts[0].order is not None:
        return None
    (part,) = linear.parts
    return Table(lambda ids: look_up(part, ids, dtype), linear if tied else None)


def has_float8(codes: Tensor) -> bool:
    """Whether the GPU multiplies 8-bit floats. Triton's interpreter, which needs none, does."""
    return not codes.is_cuda or torch.cuda.get_device_capability(codes.device) >= (8, 9)


class Tiles(NamedTuple):
    """Rows and outputs of a tile, and how it is compiled."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


def choose_tiles(rows: int, dtype: torch.dtype, *, fixed: bool) -> Tiles:
    """Small tiles for few rows, whose time is reading weights; fixed: one size for all. dtype: of what is multiplied.
    Chosen from ptxas's reports, by what spills no register."""
    if dtype == torch.float32:  # in full precision, so without tensor cores
        return Tiles(32, 64, 4, 2)
    if fixed:
        return Tiles(64, 64, 4, 3)
    if rows <= _FEW:
        return Tiles(16, 64, 4, 4)
    if rows <= _SOME:
        return Tiles(64, 64, 4, 3)
    return Tiles(128, 128, 8, 2) if dtype.itemsize == 1 else Tiles(128, 64, 8, 2)


def divided(part: Packed, tiles: Tiles) -> tuple[int, int]:
    """How many parts of the inner dimension have sums of their own, and bytes of each part; by the weight's shape and
    the tiles' alone. Sums that are stored stay fewer bytes than the weights."""
    steps, columns = cdiv(part.stride, part.step), cdiv(part.outs, tiles.block_n)
    wanted = cdiv(_PROGRAMS * triton_sizes.processors(part.codes.device.index), columns)
    count = max(1, min(wanted, steps // _LEAST_STEPS, part.stride // (8 * tiles.block_m)))
    length = cdiv(steps, count) * part.step
    return cdiv(part.stride, length), length


def multiply_whole(part: Packed, x: Tensor, bias: Tensor | None, out: Tensor, *, fixed: bool) -> None:
    """x [rows, in] @ weight.T + bias to out, some columns of a wider tensor."""
    rows, outs = out.shape
    tiles = choose_tiles(rows, x.dtype, fixed=fixed)
    count, length = divided(part, tiles) if fixed or rows <= _SOME else (1, part.stride)
    grid = cdiv(rows, tiles.block_m) * cdiv(outs, tiles.block_n)
    shape = (tiles.block_m, tiles.block_n, part.step, part.lines)
    compiled = {"num_warps": tiles.num_warps, "num_stages": tiles.num_stages}
    given, added = (x, part.codes, *part.kernel_scales), part.factors if bias is None else bias
    if count > 1 and rows <= _SOME:
        sums = torch.empty((count, rows, outs), dtype=torch.float32, device=x.device)
        kernels.multiply_part[grid, count](
            *given, sums, rows, outs, part.inner, part.stride, part.group, length, *part.form, *shape, **compiled
        )
        kernels.add_parts[rows, cdiv(outs, _COLUMNS)](
            sums, part.factors, added, out, rows, outs, out.stride(0), count, bias is not None, _COLUMNS, num_warps=4
        )
        return
    kernels.multiply_whole[grid,](
        *given, part.factors, added, out, rows, outs, part.inner, part.stride, out.stride(0), part.group, length,
        count, *part.form, bias is not None, *shape, count > 1, **compiled,
    )  # fmt: skip


def _multiply_codes(part: Packed, x: Tensor, bias: Tensor | None, out: Tensor, fixed: bool) -> None:
    """The same, of x rounded to codes of the weights' kind."""
    rows, outs = out.shape
    codes, scales = library.round_x(part, x, by_blocks=True)
    tiles = choose_tiles(rows, codes.dtype, fixed=fixed)
    held = torch.float8_e4m3fn if part.form[0] == kernels.FLOATS else torch.int8
    kernels.multiply_codes[cdiv(rows, tiles.block_m) * cdiv(outs, tiles.block_n),](
        codes.view(held), scales, part.codes.view(held), part.kernel_scales[0], part.factors,
        part.factors if bias is None else bias, out, rows, outs, part.inner, out.stride(0), part.group,
        part.scales is not None, bias is not None, tiles.block_m, tiles.block_n, BLOCK,
        num_warps=tiles.num_warps, num_stages=tiles.num_stages,
    )  # fmt: skip


def look_up(part: Packed, ids: Tensor, dtype: torch.dtype) -> Tensor:
    """Rows of the weight, [ids, inner]."""
    ids = ids.contiguous()
    out = torch.empty((len(ids), part.inner), dtype=dtype, device=ids.device)
    if len(ids):
        kernels.look_up[len(ids), cdiv(part.inner, _COLUMNS)](
            ids, part.codes, *part.kernel_scales, part.factors, out, part.outs, part.inner, part.stride,
            part.group, *part.form, part.step, part.lines, _COLUMNS, num_warps=4,
        )  # fmt: skip
    return out
