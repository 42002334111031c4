"""Quantized weights in the forms that backends compute with. A linear that multiplies x in 8 bits declares its
`ActivationRounding`, so that the norm or gate before it can round x.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_MAX_HALF_EXPONENT = 14
"""An output's scales are divided by a power of two so that they fit half floats. The largest is then below 2^15."""


def _to_factors_and_halves(numbers: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """Return factors [out] float32, which are powers of two, and float16 tensors [out, ...], to be multiplied by the
    factors.
    """
    peak = torch.stack([each.abs().amax(1) for each in numbers]).amax(0)
    exponents = torch.where(peak > 0, torch.frexp(peak).exponent, 0)
    factors = torch.ldexp(torch.ones_like(peak), exponents - _MAX_HALF_EXPONENT - 1)
    return factors, [(each / factors[:, None]).half() for each in numbers]


@dataclass(frozen=True, slots=True)
class NestedScales:
    """Scales or offsets of groups as integer multiples of a block's number. A block has 2^n consecutive groups."""

    blocks: Tensor
    """[out, in / block] float32. They are half floats times powers of two. The numbers of an output that are in use
    (see `used_blocks`) have similar magnitudes, so that half floats can store them after division by one power of two.
    """
    multiples: Tensor
    """[out, in / group] int8, from 0 to 15 if the weight has offsets."""

    @property
    def groups_per_block(self) -> int:
        return self.multiples.shape[1] // self.blocks.shape[1]

    def to_groups(self) -> Tensor:
        """Return the scales or offsets of groups, [out, in / group] float32."""
        return (self.blocks.unsqueeze(2) * self._block_multiples).flatten(1)

    def narrow(self, outputs: range | None, groups: range | None) -> NestedScales | None:
        """None if this would split a block."""
        size, blocks = self.groups_per_block, None
        if groups is not None:
            if groups.start % size or groups.stop % size:
                return None
            blocks = range(groups.start // size, groups.stop // size)
        return NestedScales(_narrow(self.blocks, outputs, blocks), _narrow(self.multiples, outputs, groups))

    def append_outputs(self, other: NestedScales) -> NestedScales:
        return NestedScales(torch.cat((self.blocks, other.blocks)), torch.cat((self.multiples, other.multiples)))

    @property
    def used_blocks(self) -> Tensor:
        """`blocks`, with 0 for each block whose multiples are all 0. The number of such a block has no effect, and may
        be so large that the output's other numbers, scaled by the same power of two, would be lost in half floats.
        """
        return torch.where(self._block_multiples.any(2), self.blocks, 0.0)

    @property
    def _block_multiples(self) -> Tensor:
        return self.multiples.unflatten(1, (self.blocks.shape[1], -1))


def _narrow(tensor: Tensor, rows: range | None, columns: range | None) -> Tensor:
    return tensor[
        slice(None) if rows is None else slice(rows.start, rows.stop),
        slice(None) if columns is None else slice(columns.start, columns.stop),
    ]


@dataclass(frozen=True, slots=True)
class GroupedWeight:
    """[out, in] integers with a scale, and maybe an offset, per group of consecutive inputs: w = scale * value(code) +
    offset.
    """

    codes: Tensor
    """8-bit codes are [out, in] int8. 4-bit codes are [out, in / 2] uint8, with the even input in the low half."""
    scales: Tensor
    """[out, in / group] float32."""
    offsets: Tensor | None = None
    """[out, in / group] float32. None means 0."""
    code_values: tuple[int, ...] | None = None
    """Values of 4-bit codes: at most 16, from -127 to 127. None: code - 8."""
    input_order: Tensor | None = None
    """[in] int64: groups are made of x[:, order]. None: natural order."""
    nested: tuple[NestedScales, ...] = ()
    """The same scales, and offsets if there are any, in nested form. Empty if unknown."""

    @property
    def bits(self) -> int:
        return 4 if self.codes.dtype == torch.uint8 else 8

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[0], self.codes.shape[1] * 8 // self.bits

    @property
    def group_size(self) -> int:
        return self.shape[1] // self.scales.shape[1]

    def to_factors_and_half_scales(self) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return factors [out] float32, and float16 scales and offsets [out, groups], to be multiplied by the factors.
        A single scale without offset becomes the factor, and scales and offsets are None.
        """
        scales, offsets = self.scales.float(), self.offsets
        if scales.shape[1] == 1 and offsets is None:
            return scales[:, 0].contiguous(), None, None
        factors, halves = _to_factors_and_halves([scales] if offsets is None else [scales, offsets.float()])
        return factors, halves[0], None if offsets is None else halves[1]

    def to_factors_and_nested_halves(self) -> tuple[Tensor, list[Tensor], Tensor]:
        """Return factors [out] float32, then float16 scales and maybe offsets [out, blocks], to be multiplied by the
        factors, and multiples [out, groups] uint8, which have those of offsets in the high nibbles.
        """
        factors, halves = _to_factors_and_halves([each.used_blocks for each in self.nested])
        multiples = self.nested[0].multiples
        if len(self.nested) > 1:
            multiples = multiples | self.nested[1].multiples << 4
        return factors, halves, multiples.view(torch.uint8)

    def dequantize(self) -> Tensor:
        """Return [out, in] float32, in the natural input order."""
        codes = self.codes
        if self.bits == 4:
            codes = torch.stack((codes & 15, codes >> 4), dim=-1).flatten(1)
            values = range(-8, 8) if self.code_values is None else self.code_values
            codes = torch.tensor(values, dtype=torch.int8, device=codes.device)[codes.int()]
        grouped = codes.unflatten(1, (-1, self.group_size)).float() * self.scales.unsqueeze(2)
        if self.offsets is not None:
            grouped += self.offsets.unsqueeze(2)
        weight = grouped.flatten(1)
        if self.input_order is None:
            return weight
        return torch.empty_like(weight).index_copy_(1, self.input_order, weight)


@dataclass(frozen=True, slots=True)
class Float8Weight:
    """A weight [out, in] of float8 with a scale per block: w = scale * code."""

    codes: Tensor
    """[out, in] float8_e4m3fn."""
    scales: Tensor
    """[ceil(out / block[0]), ceil(in / block[1])] float32."""
    scale_block: tuple[int, int]
    """(outputs, inputs) per scale: (out, in) per tensor, (1, in) per output, or DeepSeek's 128 x 128. The last blocks
    may be smaller.
    """

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[0], self.codes.shape[1]

    @property
    def inputs_per_scale(self) -> int:
        return min(self.scale_block[1], self.shape[1])

    def scales_per_output_row(self) -> Tensor:
        """Return [out, blocks of inputs] float32, with NaN for blocks that have a NaN code, because kernels do not
        recognize such codes.
        """
        scales = self.scales.float().repeat_interleave(self.scale_block[0], 0)[: self.shape[0]]
        inputs = self.inputs_per_scale
        bad = F.pad(self.codes.view(torch.uint8) & 127 == 127, (0, -self.shape[1] % inputs))
        return scales.masked_fill(bad.unflatten(1, (-1, inputs)).any(2), torch.nan)

    def dequantize(self) -> Tensor:
        """Return [out, in] float32."""
        outs, inner = self.shape
        scales = self.scales.repeat_interleave(self.scale_block[0], 0)[:outs].repeat_interleave(self.scale_block[1], 1)[
            :, :inner
        ]
        return self.codes.float() * scales


QuantizedWeight = GroupedWeight | Float8Weight


def has_same_input_order(a: Tensor | None, b: Tensor | None) -> bool:
    return a is b if a is None or b is None else torch.equal(a, b)


@dataclass(frozen=True, slots=True)
class RoundedActivations:
    codes: Tensor
    """[rows, in], integers or float8 bits."""
    scales: Tensor
    """float32, in the layout of `rounding`."""
    rounding: ActivationRounding
    dtype: torch.dtype
    """Type of x before rounding, and of the linears' results."""
    unrounded: Tensor | None
    """None if no linear reads unrounded values."""

    def __len__(self) -> int:
        return len(self.codes)

    @property
    def device(self) -> torch.device:
        return self.codes.device


Activations = Tensor | RoundedActivations


class ActivationRounding(ABC):
    """Rounds values after conversion to the model's dtype, so bits are the same as if the stored output of a norm or
    gate were rounded. Equal instances give equal bits.
    """

    @abstractmethod
    def norm_and_round(
        self, x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float, *, whole: bool
    ) -> tuple[RoundedActivations, Tensor]:
        """Return (norm of x + residual, x + residual), all [T, hidden]. Without a residual, x takes the place of x +
        residual. The norm is RMSNorm if bias is None, else LayerNorm. whole: also keep unrounded values. May overwrite
        x and residual.
        """

    @abstractmethod
    def gate_and_round(self, gate_up: Tensor, *, gelu: bool, whole: bool) -> RoundedActivations:
        """gate_up is [T, 2 * F], the result [T, F]."""


class RoundedInputLinear:
    """A linear of one or more parts that accepts RoundedActivations if a part does."""

    def input_roundings(self, rows: int) -> tuple[ActivationRounding | None, ...]:
        """One item per part; None if a part needs unrounded x."""
        raise NotImplementedError


def choose_rounding_and_needs_unrounded(readers: Sequence[object], x: Any) -> tuple[ActivationRounding, bool] | None:
    """None: do not round."""
    if not any(isinstance(each, RoundedInputLinear) for each in readers):
        return None
    roundings = [
        form
        for each in readers
        for form in (each.input_roundings(len(x)) if isinstance(each, RoundedInputLinear) else (None,))
    ]
    first = next((form for form in roundings if form is not None), None)
    return None if first is None else (first, any(form != first for form in roundings))


def select_linear_input(linear: object, x: Any) -> Any:
    return x.unrounded if isinstance(x, RoundedActivations) and not isinstance(linear, RoundedInputLinear) else x
