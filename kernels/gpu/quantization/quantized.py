"""Linears and tables of quantized weights on a GPU, by the kernels of triton_quantized.py."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.kernels.backend import LinearContext, Table
from quire.kernels.gpu.quantization import triton_quantized as kernels
from quire.kernels.gpu.triton_sizes import cdiv
from quire.kernels.quantized import Float8Weight, GroupedWeight, QuantizedWeight, same_order

_STEPS = (64, 32, 16)
"""Inputs of one product of a program: the largest that divides a group."""
_BLOCK = 128
"""Inputs of x that share a scale where it is rounded."""
_ROUNDED_AT_ONCE = 8
"""Such blocks in one program."""
_FEW, _SOME = 16, 64
"""Rows: tiles are chosen for up to so many."""
_COLUMNS = 1024
"""Of a row that is looked up, in one program."""


@dataclass(frozen=True, slots=True)
class Packed:
    """Outputs whose weights are alike, as kernels read them."""

    codes: Tensor
    """[outs, bytes]: of 4 bits as `_in_steps` lays them, else [outs, in]."""
    factors: Tensor
    """[outs] float32."""
    scales: Tensor | None
    """[groups, outs], to be multiplied by the factors; None: 1."""
    offsets: Tensor | None
    """Likewise; None: 0."""
    group: int
    """Inputs that share a scale; the last ones may be fewer."""
    form: tuple[int, int, int, bool, bool]
    """KIND, LOW, HIGH, SCALED and OFFSET of the kernels."""
    inner: int
    step: int
    """Inputs of one product."""
    order: Tensor | None = None
    """As in GroupedWeight."""
    rounds: bool = False
    """Whether x is rounded to 8 bits."""

    @property
    def nbytes(self) -> int:
        return sum(each.nbytes for each in (self.codes, self.factors, self.scales, self.offsets) if each is not None)

    @property
    def kernel_scales(self) -> tuple[Tensor, Tensor]:
        """Something in the place of those that are not there."""
        scales = self.factors if self.scales is None else self.scales
        return scales, scales if self.offsets is None else self.offsets


class QuantizedLinear:
    """Weights of one input, their outputs side by side. Memory: `parts`."""

    def __init__(self, parts: Sequence[Packed], bias: Tensor | None, *, wide: bool, fixed: bool) -> None:
        """fixed: a row has the same bits in every batch. wide: the result is float32."""
        self.parts = parts
        self.bias = bias
        self.wide = wide
        self._fixed = fixed
        self._outs = sum(len(each.codes) for each in parts)

    def __call__(self, x: Tensor, context: LinearContext) -> Tensor:
        x = x.contiguous()
        out = x.new_empty((len(x), self._outs), dtype=torch.float32 if self.wide else x.dtype)
        first = 0
        for part in self.parts if len(x) else ():
            end = first + len(part.codes)
            ordered = x if part.order is None else x.index_select(1, part.order)
            bias = None if self.bias is None else self.bias[first:end]
            (_multiply_codes if part.rounds else _multiply_whole)(part, ordered, bias, out[:, first:end], self._fixed)
            first = end
        return out


def pack_quantized(
    weights: Sequence[QuantizedWeight], bias: Tensor | None, *, wide: bool, fixed: bool
) -> QuantizedLinear | None:
    """As `Backend.pack_quantized`; None where the kernels do not know a form. fixed: as in QuantizedLinear."""
    parts: list[Packed] = []
    for weight in weights:
        if isinstance(weight, Float8Weight):
            made = pack_float8(weight, native=has_float8(weight.codes))
        else:
            made = pack_grouped(weight)
        if made is None:
            return None
        parts.append(made)
    return QuantizedLinear(_joined(parts), bias, wide=wide, fixed=fixed)


def pack_table(weight: QuantizedWeight, *, dtype: torch.dtype, tied: bool, fixed: bool) -> Table | None:
    """As `Backend.pack_table`, likewise."""
    linear = pack_quantized([weight], None, wide=True, fixed=fixed)
    if linear is None or linear.parts[0].order is not None:
        return None
    (part,) = linear.parts
    return Table(lambda ids: look_up(part, ids, dtype), linear if tied else None)


def has_float8(codes: Tensor) -> bool:
    """Whether the GPU multiplies 8-bit floats. Triton's interpreter, which needs none, does."""
    return not codes.is_cuda or torch.cuda.get_device_capability(codes.device) >= (8, 9)


def pack_grouped(weight: GroupedWeight) -> Packed | None:
    """8-bit integers with a scale for each output alone are multiplied by x in 8 bits, as on CPUs."""
    inner, single = weight.shape[1], weight.scales.shape[1] == 1
    steps = [step for step in _STEPS if single or weight.group % step == 0]
    if not steps:
        return None
    factors, scales, offsets = weight.half_scales()
    if weight.bits == 8:
        kind, step, codes = kernels.INTEGERS, steps[0], weight.codes.contiguous()
    else:
        kind = kernels.HALVES if weight.values is None else kernels.TABLE
        step = next((each for each in steps if inner % (2 * each) == 0), steps[-1])
        codes = _in_steps(weight.codes, step)
    scales, offsets = (None if each is None else each.t().contiguous() for each in (scales, offsets))
    form = (kind, *_words(weight.values), scales is not None, offsets is not None)
    rounds = weight.bits == 8 and scales is None
    return Packed(codes, factors, scales, offsets, weight.group, form, inner, step, weight.order, rounds)


def pack_float8(weight: Float8Weight, *, native: bool) -> Packed | None:
    """native: the GPU multiplies 8-bit floats, so x is rounded to them where blocks allow; else x stays as it is."""
    inner, single = weight.shape[1], weight.inputs == weight.shape[1]
    steps = [step for step in _STEPS if single or weight.inputs % step == 0]
    if not steps:
        return None
    scales, codes = weight.scales_by_output(), weight.codes.view(torch.uint8).contiguous()
    factors = scales[:, 0].contiguous() if single else torch.ones_like(scales[:, 0])
    turned = None if single else scales.t().contiguous()
    rounds = native and (single or weight.inputs % _BLOCK == 0)
    form = (kernels.FLOATS, 0, 0, not single, False)
    return Packed(codes, factors, turned, None, weight.inputs, form, inner, steps[0], rounds=rounds)


def _words(values: tuple[int, ...] | None) -> tuple[int, int]:
    """16 values, a byte each, as two integers."""
    listed = bytes(value & 255 for value in values or ())
    return int.from_bytes(listed[:8], "little", signed=True), int.from_bytes(listed[8:], "little", signed=True)


def _in_steps(codes: Tensor, step: int) -> Tensor:
    """4-bit codes [out, in / 2], the even input in the low half of a byte, in another order: those of `step` inputs in
    the lower halves of as many bytes, the next ones in the upper. Inputs are filled up with zeros."""
    each = torch.stack((codes & 15, codes >> 4), dim=-1).flatten(1)
    each = F.pad(each, (0, -each.shape[1] % (2 * step))).unflatten(1, (-1, 2, step))
    return (each[:, :, 0] | each[:, :, 1] << 4).flatten(1)


def _joined(parts: Sequence[Packed]) -> list[Packed]:
    """Neighbours that are alike as one."""
    joined = list(parts[:1])
    for each in parts[1:]:
        last = joined[-1]
        if not _alike(last, each):
            joined.append(each)
            continue
        scales = None if last.scales is None or each.scales is None else torch.cat((last.scales, each.scales), 1)
        offsets = None if last.offsets is None or each.offsets is None else torch.cat((last.offsets, each.offsets), 1)
        codes, factors = torch.cat((last.codes, each.codes)), torch.cat((last.factors, each.factors))
        joined[-1] = replace(last, codes=codes, factors=factors, scales=scales, offsets=offsets)
    return joined


def _alike(a: Packed, b: Packed) -> bool:
    return (a.form, a.group, a.step, a.rounds) == (b.form, b.group, b.step, b.rounds) and same_order(a.order, b.order)


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


def _multiply_whole(part: Packed, x: Tensor, bias: Tensor | None, out: Tensor, fixed: bool) -> None:
    """x [rows, in] @ weight.T + bias to out, some columns of a wider tensor."""
    rows, outs = out.shape
    tiles = choose_tiles(rows, x.dtype, fixed=fixed)
    kernels.multiply_whole[cdiv(rows, tiles.block_m) * cdiv(outs, tiles.block_n),](
        x, part.codes, *part.kernel_scales, part.factors, part.factors if bias is None else bias, out, rows, outs,
        part.inner, part.codes.shape[1], out.stride(0), part.group, *part.form, bias is not None,
        tiles.block_m, tiles.block_n, part.step, num_warps=tiles.num_warps, num_stages=tiles.num_stages,
    )  # fmt: skip


def _multiply_codes(part: Packed, x: Tensor, bias: Tensor | None, out: Tensor, fixed: bool) -> None:
    """The same, of x rounded to codes of the weights' kind."""
    rows, outs = out.shape
    blocks = cdiv(part.inner, _BLOCK)
    codes = torch.empty(x.shape, dtype=part.codes.dtype, device=x.device)
    scales = torch.empty((blocks, rows), dtype=torch.float32, device=x.device)
    kernels.round_rows[rows, cdiv(blocks, _ROUNDED_AT_ONCE)](
        x, codes, scales, rows, part.inner, part.form[0], _BLOCK, _ROUNDED_AT_ONCE, num_warps=4
    )
    tiles = choose_tiles(rows, codes.dtype, fixed=fixed)
    held = torch.float8_e4m3fn if part.form[0] == kernels.FLOATS else torch.int8
    kernels.multiply_codes[cdiv(rows, tiles.block_m) * cdiv(outs, tiles.block_n),](
        codes.view(held), scales, part.codes.view(held), part.kernel_scales[0], part.factors,
        part.factors if bias is None else bias, out, rows, outs, part.inner, out.stride(0), part.group,
        part.scales is not None, bias is not None, tiles.block_m, tiles.block_n, _BLOCK,
        num_warps=tiles.num_warps, num_stages=tiles.num_stages,
    )  # fmt: skip


def look_up(part: Packed, ids: Tensor, dtype: torch.dtype) -> Tensor:
    """Rows of the weight, [ids, in]."""
    ids = ids.contiguous()
    out = torch.empty((len(ids), part.inner), dtype=dtype, device=ids.device)
    if len(ids):
        kernels.look_up[len(ids), cdiv(part.inner, _COLUMNS)](
            ids, part.codes, *part.kernel_scales, part.factors, out, len(part.codes), part.inner, part.codes.shape[1],
            part.group, *part.form, part.step, _COLUMNS, num_warps=4,
        )  # fmt: skip
    return out
