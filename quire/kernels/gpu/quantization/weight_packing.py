from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.kernels.gpu.quantization import triton_quantized as kernels
from quire.kernels.quantized_tensors import Float8Weight, GroupedWeight, has_same_input_order

_STEP_SIZES = (64, 32, 16)
"""Inputs per step. A step must divide a group. The largest such step is used, unless a smaller one needs less padding.
"""
SCALE_BLOCK = 128
INTERLEAVED_OUTPUTS = 64
_NIBBLES_PER_WORD = 4
_MAX_PADDING = 0.03
"""Maximum padding that a longer step may add, as a fraction of a line."""
_FP4_VALUES = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
"""Doubled 4-bit floats (e2m1), by code."""


@dataclass(frozen=True, slots=True)
class PackedWeight:
    codes: Tensor
    """If codes are packed: [lines, words], int16 words of four 4-bit codes (`_pack_nibbles`) or two 8-bit codes
    (`_pack_byte_pairs`), with or without interleaved outputs. Otherwise: [outs, in], one byte or one number per weight.
    """
    factors: Tensor
    """[outs] float32."""
    scales: Tensor | None
    """[groups, outs], to be multiplied by the factors. None means 1."""
    offsets: Tensor | None
    """[groups, outs], to be multiplied by the factors. None means 0."""
    group_size: int
    """Inputs per scale. The last group may be smaller."""
    kernel_form: tuple[int, int, int, bool, bool]
    """KIND, LOW, HIGH, SCALED and OFFSET."""
    in_features: int
    inputs_per_step: int
    out_features: int
    input_order: Tensor | None = None
    rounds_activations: bool = False
    block_scales: Tensor | None = None
    """[ceil(outs / 128), ceil(in / 128)] float32, in addition to `scales`."""
    interleaved_outputs: int = 1
    """Number of outputs that share a line, in which their steps alternate."""

    @property
    def nbytes(self) -> int:
        tensors = (self.codes, self.factors, self.scales, self.offsets, self.block_scales)
        return sum(each.nbytes for each in tensors if each is not None)

    @property
    def kernel_key(self) -> tuple[object, ...]:
        """Equal for weights that one program can multiply."""
        return self.kernel_form, self.group_size, self.inputs_per_step, self.codes.dtype

    @property
    def words_per_output(self) -> int:
        return self.codes.shape[1]

    @property
    def codes_per_word(self) -> int:
        if self.kernel_form[0] in (kernels.NIBBLES, kernels.TABLE, kernels.NIBBLE_FLOATS):
            return _NIBBLES_PER_WORD
        return 2 if self.pair_distance else 1

    @property
    def pair_distance(self) -> int:
        """Inputs per step if words have two 8-bit codes, otherwise 0."""
        pairs = self.kernel_form[0] in (kernels.INTEGERS, kernels.FLOATS) and self.codes.dtype == torch.int16
        return self.inputs_per_step if pairs else 0

    @property
    def kernel_scales_and_offsets(self) -> tuple[Tensor, Tensor]:
        """A tensor that the kernel does not read takes the place of None."""
        scales = self.factors if self.scales is None else self.scales
        return scales, scales if self.offsets is None else self.offsets


def pack_group_quantized(weight: GroupedWeight) -> PackedWeight | None:
    """If weights are 8-bit integers with one scale and no offset per output, x is rounded to 8 bits."""
    (outs, inner), single = weight.shape, weight.scales.shape[1] == 1
    steps = [step for step in _STEP_SIZES if single or weight.group_size % step == 0]
    if not steps:
        return None
    factors, scales, offsets = weight.to_factors_and_half_scales()
    weight = _center_consecutive_values(weight)
    if weight.bits == 8:
        kind, step = kernels.INTEGERS, _choose_byte_pair_step(steps, inner)
        codes = _pack_byte_pairs(weight.codes, step)
    else:
        kind = kernels.NIBBLES if weight.code_values is None else kernels.TABLE
        kind = kernels.NIBBLE_FLOATS if weight.code_values == _FP4_VALUES else kind
        step = next((each for each in steps if -inner % (_NIBBLES_PER_WORD * each) <= _MAX_PADDING * inner), steps[-1])
        codes = _pack_nibbles(weight.codes, step)
    scales, offsets = (None if each is None else each.t().contiguous() for each in (scales, offsets))
    words = _table_values_as_two_int64(weight.code_values if kind == kernels.TABLE else None)
    form = (kind, *words, scales is not None, offsets is not None)
    rounds = weight.bits == 8 and scales is None
    return PackedWeight(
        codes, factors, scales, offsets, weight.group_size, form, inner, step, outs, weight.input_order, rounds
    )


def _center_consecutive_values(weight: GroupedWeight) -> GroupedWeight:
    """If the table's values are consecutive integers, shift the codes so that each value is code - 8 and no table is
    needed.
    """
    values = weight.code_values
    if values is None or values != tuple(range(values[0], values[0] + len(values))):
        return weight
    shift = values[0] + 8
    if not 0 <= shift <= 16 - len(values):
        return weight
    return replace(weight, codes=weight.codes + shift * 0x11, code_values=None)


def pack_float8(weight: Float8Weight, *, native: bool) -> PackedWeight | None:
    """If `native`, the GPU multiplies float8, and x is rounded to float8 if scales cover whole rows or multiples of
    SCALE_BLOCK inputs.
    """
    (outs, inner), single = weight.shape, weight.inputs_per_scale == weight.shape[1]
    steps = [step for step in _STEP_SIZES if single or weight.inputs_per_scale % step == 0]
    if not steps:
        return None
    scales, step = weight.scales_per_output_row(), _choose_byte_pair_step(steps, inner)
    codes = _pack_byte_pairs(weight.codes.view(torch.uint8), step)
    factors = scales[:, 0].contiguous() if single else torch.ones_like(scales[:, 0])
    transposed_scales = None if single else scales.t().contiguous()
    rounds = native and (single or weight.inputs_per_scale % SCALE_BLOCK == 0)
    squares = (
        weight.scales.float().contiguous()
        if rounds and not single and weight.scale_block == (SCALE_BLOCK, SCALE_BLOCK)
        else None
    )
    form = (kernels.FLOATS, 0, 0, not single, False)
    extras = (None, rounds, squares)
    return PackedWeight(
        codes, factors, transposed_scales, None, weight.inputs_per_scale, form, inner, step, outs, *extras
    )


def interleave_output_rows(part: PackedWeight) -> PackedWeight:
    """Interleave outputs, so that reads, which dominate the time of few rows, are contiguous."""
    if part.codes_per_word == 1 or part.rounds_activations or part.interleaved_outputs > 1:
        return part
    padded = F.pad(part.codes, (0, 0, 0, -part.out_features % INTERLEAVED_OUTPUTS))
    laid = padded.unflatten(1, (-1, part.inputs_per_step)).unflatten(0, (-1, INTERLEAVED_OUTPUTS)).transpose(1, 2)
    return replace(part, codes=laid.reshape(padded.shape), interleaved_outputs=INTERLEAVED_OUTPUTS)


def merge_adjacent_weights(parts: Sequence[PackedWeight]) -> list[PackedWeight]:
    """Call before `interleave_output_rows`."""
    merged = list(parts[:1])
    for each in parts[1:]:
        last = merged[-1]
        if not _can_merge(last, each):
            merged.append(each)
            continue
        scales = None if last.scales is None or each.scales is None else torch.cat((last.scales, each.scales), 1)
        offsets = None if last.offsets is None or each.offsets is None else torch.cat((last.offsets, each.offsets), 1)
        squares = None
        if last.block_scales is not None and each.block_scales is not None and last.out_features % SCALE_BLOCK == 0:
            squares = torch.cat((last.block_scales, each.block_scales))
        codes, factors = torch.cat((last.codes, each.codes)), torch.cat((last.factors, each.factors))
        scaled = replace(last, scales=scales, offsets=offsets, block_scales=squares)
        merged[-1] = replace(scaled, codes=codes, factors=factors, out_features=last.out_features + each.out_features)
    return merged


def _table_values_as_two_int64(values: tuple[int, ...] | None) -> tuple[int, int]:
    listed = bytes(value & 255 for value in values or ())
    return int.from_bytes(listed[:8], "little", signed=True), int.from_bytes(listed[8:], "little", signed=True)


def _pack_nibbles(codes: Tensor, step: int) -> Tensor:
    """codes are [out, in / 2], with the even input in the low half. `step` inputs become the lowest 4 bits of `step`
    words, the next `step` inputs the bits above. Zero-padded.
    """
    each = torch.stack((codes & 15, codes >> 4), dim=-1).flatten(1)
    each = F.pad(each, (0, -each.shape[1] % (_NIBBLES_PER_WORD * step))).unflatten(1, (-1, _NIBBLES_PER_WORD, step))
    pairs = each[:, :, ::2] | each[:, :, 1::2] << 4
    return torch.stack((pairs[:, :, 0], pairs[:, :, 1]), dim=-1).flatten(1).view(torch.int16)


def _choose_byte_pair_step(steps: Sequence[int], inner: int) -> int:
    """`steps` are longest first."""
    return next((each for each in steps if inner % (2 * each) == 0), steps[0])


def _pack_byte_pairs(codes: Tensor, step: int) -> Tensor:
    """codes are [out, in]. The first of two steps becomes the low bytes of words, the second the high bytes."""
    if codes.shape[1] % (2 * step):
        return codes.contiguous()
    return codes.unflatten(1, (-1, 2, step)).transpose(2, 3).flatten(1).view(torch.int16)


def _can_merge(a: PackedWeight, b: PackedWeight) -> bool:
    return (a.kernel_key, a.rounds_activations) == (b.kernel_key, b.rounds_activations) and has_same_input_order(
        a.input_order, b.input_order
    )
