"""Weights of few bits as the kernels of triton_quantized.py read them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.kernels.gpu.quantization import triton_quantized as kernels
from quire.kernels.quantized import Float8Weight, GroupedWeight, same_order

_STEPS = (64, 32, 16)
"""Inputs of one product of a program: the largest that divides a group."""
BLOCK = 128
"""Inputs of x that share a scale where it is rounded."""
LINES = 64
"""Outputs whose words lie side by side, a step of each: a program of so many reads memory in one line."""
_CODES = 4
"""Of 4 bits in a word."""
_MOST_FILLED = 0.03
"""Of a line, by zeros behind its inputs, for longer steps."""
_FLOATS = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
"""4-bit floats (e2m1), doubled, by their codes."""


@dataclass(frozen=True, slots=True)
class Packed:
    """Outputs whose weights are alike, as kernels read them."""

    codes: Tensor
    """[lines, words]: int16 of four codes of 4 bits, as `_in_steps` lays them, or of two of 8 (`_in_pairs`), and
    perhaps `laid_for_decodes`; else [outs, in], a byte or a number each."""
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
    outs: int
    order: Tensor | None = None
    """As in GroupedWeight."""
    rounds: bool = False
    """Whether x is rounded to 8 bits."""
    squares: Tensor | None = None
    """[ceil(outs / 128), ceil(in / 128)] float32: scales of 8-bit floats by squares of so many, beside `scales`."""
    lines: int = 1
    """Outputs that lie side by side, a step of each."""

    @property
    def nbytes(self) -> int:
        tensors = (self.codes, self.factors, self.scales, self.offsets, self.squares)
        return sum(each.nbytes for each in tensors if each is not None)

    @property
    def kind(self) -> tuple[object, ...]:
        """What all weights have in common that one program of a kernel multiplies."""
        return self.form, self.group, self.step, self.codes.dtype

    @property
    def stride(self) -> int:
        """Words of an output."""
        return self.codes.shape[1]

    @property
    def in_word(self) -> int:
        """How many codes a word has."""
        if self.form[0] in (kernels.NIBBLES, kernels.TABLE, kernels.NIBBLE_FLOATS):
            return _CODES
        return 2 if self.paired else 1

    @property
    def paired(self) -> int:
        """Where two codes of 8 bits are in a word, so that x in codes has their order: inputs of a step; else 0."""
        pairs = self.form[0] in (kernels.INTEGERS, kernels.FLOATS) and self.codes.dtype == torch.int16
        return self.step if pairs else 0

    @property
    def kernel_scales(self) -> tuple[Tensor, Tensor]:
        """Something in the place of those that are not there."""
        scales = self.factors if self.scales is None else self.scales
        return scales, scales if self.offsets is None else self.offsets


def pack_grouped(weight: GroupedWeight) -> Packed | None:
    """8-bit integers with a scale for each output alone are multiplied by x in 8 bits, as on CPUs. None where a group
    is of no whole step."""
    (outs, inner), single = weight.shape, weight.scales.shape[1] == 1
    steps = [step for step in _STEPS if single or weight.group % step == 0]
    if not steps:
        return None
    factors, scales, offsets = weight.half_scales()
    if weight.bits == 8:
        kind, step = kernels.INTEGERS, _pair_step(steps, inner)
        codes = _in_pairs(weight.codes, step)
    else:
        kind = kernels.NIBBLES if weight.values is None else kernels.TABLE
        kind = kernels.NIBBLE_FLOATS if weight.values == _FLOATS else kind
        step = next((each for each in steps if -inner % (_CODES * each) <= _MOST_FILLED * inner), steps[-1])
        codes = _in_steps(weight.codes, step)
    scales, offsets = (None if each is None else each.t().contiguous() for each in (scales, offsets))
    words = _words(weight.values if kind == kernels.TABLE else None)
    form = (kind, *words, scales is not None, offsets is not None)
    rounds = weight.bits == 8 and scales is None
    return Packed(codes, factors, scales, offsets, weight.group, form, inner, step, outs, weight.order, rounds)


def pack_float8(weight: Float8Weight, *, native: bool) -> Packed | None:
    """native: the GPU multiplies 8-bit floats, so x is rounded to them where blocks allow; else x stays as it is."""
    (outs, inner), single = weight.shape, weight.inputs == weight.shape[1]
    steps = [step for step in _STEPS if single or weight.inputs % step == 0]
    if not steps:
        return None
    scales, step = weight.scales_by_output(), _pair_step(steps, inner)
    codes = _in_pairs(weight.codes.view(torch.uint8), step)
    factors = scales[:, 0].contiguous() if single else torch.ones_like(scales[:, 0])
    turned = None if single else scales.t().contiguous()
    rounds = native and (single or weight.inputs % BLOCK == 0)
    squares = weight.scales.float().contiguous() if rounds and not single and weight.block == (BLOCK, BLOCK) else None
    form = (kernels.FLOATS, 0, 0, not single, False)
    beside = (None, rounds, squares)
    return Packed(codes, factors, turned, None, weight.inputs, form, inner, step, outs, *beside)


def laid_for_decodes(part: Packed) -> Packed:
    """Words so that a program, which multiplies LINES outputs, reads steps that follow each other in memory: of a few
    rows the time of a product is that of reading its weights. Outputs are filled up with zeros. Others stay, and those
    that PyTorch multiplies."""
    if part.in_word == 1 or part.rounds or part.lines > 1:
        return part
    padded = F.pad(part.codes, (0, 0, 0, -part.outs % LINES))
    laid = padded.unflatten(1, (-1, part.step)).unflatten(0, (-1, LINES)).transpose(1, 2)
    return replace(part, codes=laid.reshape(padded.shape), lines=LINES)


def joined(parts: Sequence[Packed]) -> list[Packed]:
    """Neighbours that are alike as one; before they are laid for decodes."""
    found = list(parts[:1])
    for each in parts[1:]:
        last = found[-1]
        if not _alike(last, each):
            found.append(each)
            continue
        scales = None if last.scales is None or each.scales is None else torch.cat((last.scales, each.scales), 1)
        offsets = None if last.offsets is None or each.offsets is None else torch.cat((last.offsets, each.offsets), 1)
        squares = None
        if last.squares is not None and each.squares is not None and last.outs % BLOCK == 0:
            squares = torch.cat((last.squares, each.squares))
        codes, factors = torch.cat((last.codes, each.codes)), torch.cat((last.factors, each.factors))
        scaled = replace(last, scales=scales, offsets=offsets, squares=squares)
        found[-1] = replace(scaled, codes=codes, factors=factors, outs=last.outs + each.outs)
    return found


def _words(values: tuple[int, ...] | None) -> tuple[int, int]:
    """16 values, a byte each, as two integers."""
    listed = bytes(value & 255 for value in values or ())
    return int.from_bytes(listed[:8], "little", signed=True), int.from_bytes(listed[8:], "little", signed=True)


def _in_steps(codes: Tensor, step: int) -> Tensor:
    """Words [out, words] of 4-bit codes [out, in / 2], the even input in the low half of a byte: those of `step` inputs
    are the lowest 4 bits of as many words, the next ones those above, and so on. Inputs are filled up with zeros."""
    each = torch.stack((codes & 15, codes >> 4), dim=-1).flatten(1)
    each = F.pad(each, (0, -each.shape[1] % (_CODES * step))).unflatten(1, (-1, _CODES, step))
    pairs = each[:, :, ::2] | each[:, :, 1::2] << 4
    return torch.stack((pairs[:, :, 0], pairs[:, :, 1]), dim=-1).flatten(1).view(torch.int16)


def _pair_step(steps: Sequence[int], inner: int) -> int:
    """The longest step of which the inputs are pairs; the longest of all where they are of none."""
    return next((each for each in steps if inner % (2 * each) == 0), steps[0])


def _in_pairs(codes: Tensor, step: int) -> Tensor:
    """Words [out, in / 2] of 8-bit codes [out, in]: of two steps of inputs the first ones are the lower bytes, the
    others the upper ones. As they are where the last two steps would not be whole."""
    if codes.shape[1] % (2 * step):
        return codes.contiguous()
    return codes.unflatten(1, (-1, 2, step)).transpose(2, 3).flatten(1).view(torch.int16)


def _alike(a: Packed, b: Packed) -> bool:
    return (a.kind, a.rounds) == (b.kind, b.rounds) and same_order(a.order, b.order)
