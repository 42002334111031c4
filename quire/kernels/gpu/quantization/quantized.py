"""Linears and tables of quantized weights on a GPU, by the kernels of triton_quantized.py and by PyTorch's products."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from quire.kernels.backend import LinearContext, Table
from quire.kernels.gpu import triton_sizes
from quire.kernels.gpu.quantization import library, rounding, trial
from quire.kernels.gpu.quantization import triton_quantized as kernels
from quire.kernels.gpu.quantization.packing import (
    BLOCK,
    Packed,
    joined,
    laid_for_decodes,
    pack_float8,
    pack_grouped,
)
from quire.kernels.gpu.quantization.rounding import Eights
from quire.kernels.gpu.triton_sizes import cdiv
from quire.kernels.quantized import Float8Weight, Given, QuantizedWeight, Rounded, Rounding, RoundingLinear

log = logging.getLogger("quire.kernels")

_FEW, _SOME = 16, 64
"""Rows: tiles are chosen for up to so many."""
_EXPANDED = 256
"""Rows from which on weights that x is not rounded for are expanded once, for PyTorch's product of 16 bits."""
_LONG, _LONG_BYTES = 64, 112 * 1024
"""Words of a long step, and the shared memory of three of them with the inputs of _SOME rows."""
_COLUMNS = 1024
"""Of a row that is looked up, or of sums, in one program."""
_PROGRAMS = 4
"""For each multiprocessor, so that memory is never waited for."""
_LEAST_STEPS = 4
"""Of a part of the inner dimension."""


class QuantizedLinear(RoundingLinear):
    """Weights of one input, their outputs side by side. Memory: `parts`."""

    def __init__(
        self,
        parts: Sequence[Packed],
        bias: Tensor | None,
        *,
        wide: bool,
        fixed: bool,
        products: Sequence[library.Product | None] = (),
        fuses: bool = False,
    ) -> None:
        """fixed: a row has the same bits in every batch. wide: the result is float32. products: by part, by which of
        PyTorch's many rows are multiplied; (): by none. fuses: norms and gates may give x in 8 bits."""
        self.parts = parts
        self._products = products or [None] * len(parts)
        self.bias = bias
        self.wide = wide
        self.expanded_bytes = library.EXPANDED_BYTES
        """Of weights that are expanded at a time."""
        self._fixed = fixed
        self._outs = sum(each.outs for each in parts)
        found = zip(parts, self._products, strict=True)
        self._forms = tuple(None if part.order is not None else _form(part, product) for part, product in found)
        """How x is rounded, where there are many rows. Where its inputs have another order it is by the part itself."""
        self._fused = self._forms if fuses else (None,) * len(parts)
        self._unrounded = (None,) * len(parts)

    @property
    def movable(self) -> list[Tensor]:
        """As kernels/streaming/from_host.py has it: what is large."""
        large = [tensor for each in self.parts for tensor in (each.codes, each.scales, each.offsets)]
        return [each for each in large if each is not None]

    def roundings(self, rows: int) -> tuple[Rounding | None, ...]:
        return self._fused if self._rounds(rows) else self._unrounded

    def _rounds(self, rows: int) -> bool:
        """Few rows are not rounded: the weights alone are small then, and the time is that of reading them."""
        return self._fixed or rows > _FEW

    def __call__(self, x: Given, context: LinearContext) -> Tensor:
        rows, dtype = len(x), torch.float32 if self.wide else x.dtype
        given = {x.form: x} if isinstance(x, Rounded) else dict[Rounding, Rounded]()
        whole = x.whole if isinstance(x, Rounded) else x.contiguous()
        out = None if len(self.parts) == 1 and rows else torch.empty((rows, self._outs), dtype=dtype, device=x.device)
        made, first = out, 0
        for number, form in enumerate((self._forms if self._rounds(rows) else self._unrounded) if rows else ()):
            end = first + self.parts[number].outs
            bias = None if self.bias is None else self.bias[first:end]
            to = None if out is None else out[:, first:end]
            if form is None:
                assert whole is not None
                made = self._multiply(number, whole, bias, dtype, to)
            else:
                if form not in given:
                    assert whole is not None
                    given[form] = form.of(whole)
                made = self._multiply_rounded(number, given[form], bias, dtype, to)
            first = end
        found = made if out is None else out
        assert found is not None
        return found

    def _multiply(self, number: int, x: Tensor, bias: Tensor | None, dtype: torch.dtype, out: Tensor | None) -> Tensor:
        """x @ part.T + bias of this type, to `out`, some columns of a wider tensor, where it is given."""
        part, rows = self.parts[number], len(x)
        x = x if part.order is None else x.index_select(1, part.order)
        if self._rounds(rows) and (form := _form(part, self._products[number])) is not None:
            return self._multiply_rounded(number, form.of(x), bias, dtype, out)
        out = x.new_empty((rows, part.outs), dtype=dtype) if out is None else out
        many = not self._fixed and not self.wide and rows >= _EXPANDED
        if many and x.dtype != torch.float32:
            library.multiply_expanded(part, x, bias, out, self.expanded_bytes)
        else:
            multiply_whole(part, x, bias, out, fixed=self._fixed)
        return out

    def _multiply_rounded(
        self, number: int, x: Rounded, bias: Tensor | None, dtype: torch.dtype, out: Tensor | None
    ) -> Tensor:
        """The same of x in the form of the part."""
        part, product = self.parts[number], self._products[number]
        if product is not None:
            made = library.multiply(part, product, x, bias)
            return made if out is None else out.copy_(made)
        if out is None:
            out = torch.empty((len(x), part.outs), dtype=dtype, device=x.device)
        _multiply_codes(part, x, bias, out, self._fixed)
        return out


def _form(part: Packed, product: library.Product | None) -> Eights | None:
    """How x is rounded for many rows; None: it is not."""
    if not part.rounds:
        return None
    integers = part.form[0] == kernels.INTEGERS
    return Eights(integers, product is None or product == library.Product.SQUARES, part.paired)


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
    forms = {_form(*each) for each in zip(parts, products, strict=True)} - {None}
    fuses = all(rounding.fuses(form, parts[0].inner, dtype, parts[0].codes.device) for form in forms if form)
    return QuantizedLinear(parts, bias, wide=wide, fixed=fixed, products=products, fuses=fuses)


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


def choose_tiles(rows: int, dtype: torch.dtype, *, fixed: bool, part: Packed | None = None) -> Tiles:
    """Small tiles for few rows, whose time is reading weights; fixed: one size for all. dtype: of what is multiplied.
    part: of weights that are not multiplied in their codes. The figures of an H100 chose them."""
    if dtype == torch.float32:  # in full precision, so without tensor cores
        return Tiles(32, 64, 4, 2)
    nibbles, long, device = False, False, None
    if part is not None:
        nibbles, device = part.in_word == 4, part.codes.device.index
        long = nibbles and part.step >= _LONG
    if rows <= _FEW and not fixed:
        return Tiles(16, 128 if nibbles and not long else 64, 4, 3 if nibbles else 4)
    if rows <= 2 * _FEW and not fixed and part is not None:
        return Tiles(32, 64, 4, 3)
    if fixed or rows <= _SOME or nibbles:
        fits = not long or triton_sizes.shared_bytes(device) >= _LONG_BYTES
        return Tiles(64, 64, 4, 3 if fits else 2)
    return Tiles(128, 128, 8, 2) if dtype.itemsize == 1 else Tiles(128, 64, 8, 2)


def divided(part: Packed, tiles: Tiles) -> tuple[int, int]:
    """How many parts of the inner dimension have sums of their own, and words of each part; by the weight's shape and
    the tiles' alone. Sums that are stored stay fewer bytes than the weights."""
    steps, columns = cdiv(part.stride, part.step), cdiv(part.outs, tiles.block_n)
    wanted = cdiv(_PROGRAMS * triton_sizes.processors(part.codes.device.index), columns)
    count = max(1, min(wanted, steps // _LEAST_STEPS, part.stride * part.codes.itemsize // (8 * tiles.block_m)))
    length = cdiv(steps, count) * part.step
    return cdiv(part.stride, length), length


def multiply_whole(part: Packed, x: Tensor, bias: Tensor | None, out: Tensor, *, fixed: bool) -> None:
    """x [rows, in] @ weight.T + bias to out, some columns of a wider tensor."""
    rows, outs = out.shape
    tiles = choose_tiles(rows, x.dtype, fixed=fixed, part=part)
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


def _multiply_codes(part: Packed, x: Rounded, bias: Tensor | None, out: Tensor, fixed: bool) -> None:
    """The same, of x in codes of the weights' kind, by blocks."""
    rows, outs = out.shape
    tiles = choose_tiles(rows, x.codes.dtype, fixed=fixed)
    held = torch.float8_e4m3fn if part.form[0] == kernels.FLOATS else torch.int8
    kernels.multiply_codes[cdiv(rows, tiles.block_m) * cdiv(outs, tiles.block_n),](
        x.codes.view(held), x.scales, part.codes.view(held), part.kernel_scales[0], part.factors,
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
