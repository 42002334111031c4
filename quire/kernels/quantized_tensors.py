"""Weights in few bits: the forms that backends compute with. Every format of a checkpoint (GGUF, GPTQ, FP8 ...) is
turned into one of them when it is loaded, so a kernel knows forms and no formats.

Some linears multiply x in 8 bits, too. Such a linear says how (`ActivationRounding`), so that a norm or a gate before
it gives x as it is multiplied, instead of numbers that are rounded afterwards."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_MAX_HALF_EXPONENT = 14
"""An output's scales are multiplied by a power of two so that half floats hold them: the largest is below 2^15."""


@dataclass(frozen=True, slots=True)
class GroupedWeight:
    """[out, in] integers with a scale, and perhaps an offset, for each group of consecutive inputs:
    w = scale * value(code) + offset."""

    codes: Tensor
    """8 bits: [out, in] int8, a code is its value. 4 bits: [out, in / 2] uint8, the code of the even input in the low
    half of a byte."""
    scales: Tensor
    """[out, in / group] float32."""
    offsets: Tensor | None = None
    """The same shape and dtype; None: 0."""
    code_values: tuple[int, ...] | None = None
    """What each of the 16 4-bit codes stands for, from -127 to 127; None: code - 8."""
    input_order: Tensor | None = None
    """[in] int64: the groups are of x[:, order], not of x; None: of x itself."""

    @property
    def bits(self) -> int:
        return 4 if self.codes.dtype == torch.uint8 else 8

    @property
    def shape(self) -> tuple[int, int]:
        """(out, in)."""
        return self.codes.shape[0], self.codes.shape[1] * 8 // self.bits

    @property
    def group_size(self) -> int:
        """Inputs that share a scale."""
        return self.shape[1] // self.scales.shape[1]

    def to_factors_and_half_scales(self) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Factors [out] float32, and scales and offsets [out, groups] in float16, which are to be multiplied by these.
        An output with one scale and no offset has that as its factor and no others."""
        scales, offsets = self.scales.float(), self.offsets
        if scales.shape[1] == 1 and offsets is None:
            return scales[:, 0].contiguous(), None, None
        halves = [scales] if offsets is None else [scales, offsets.float()]
        peak = torch.stack([each.abs().amax(1) for each in halves]).amax(0)
        exponents = torch.where(peak > 0, torch.frexp(peak).exponent, 0)
        factors = torch.ldexp(torch.ones_like(peak), exponents - _MAX_HALF_EXPONENT - 1)
        halves = [(each / factors[:, None]).half() for each in halves]
        return factors, halves[0], None if offsets is None else halves[1]

    def dequantize(self) -> Tensor:
        """[out, in] float32, its inputs in their own order."""
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
    """[out, in] 8-bit floats with a scale for each block of them: w = scale * code."""

    codes: Tensor
    """[out, in] float8_e4m3fn."""
    scales: Tensor
    """[ceil(out / block[0]), ceil(in / block[1])] float32."""
    scale_block: tuple[int, int]
    """Outputs and inputs that share a scale: (out, in) is one for the whole tensor, (1, in) one for each output, and
    DeepSeek's are 128 x 128. The last blocks may be smaller."""

    @property
    def shape(self) -> tuple[int, int]:
        """(out, in)."""
        return self.codes.shape[0], self.codes.shape[1]

    @property
    def inputs_per_scale(self) -> int:
        """That share a scale."""
        return min(self.scale_block[1], self.shape[1])

    def scales_per_output_row(self) -> Tensor:
        """[out, blocks of inputs] float32, NaN where a code is: kernels know numbers only."""
        scales = self.scales.float().repeat_interleave(self.scale_block[0], 0)[: self.shape[0]]
        inputs = self.inputs_per_scale
        bad = F.pad(self.codes.view(torch.uint8) & 127 == 127, (0, -self.shape[1] % inputs))
        return scales.masked_fill(bad.unflatten(1, (-1, inputs)).any(2), torch.nan)

    def dequantize(self) -> Tensor:
        """[out, in] float32."""
        outs, inner = self.shape
        scales = self.scales.repeat_interleave(self.scale_block[0], 0)[:outs].repeat_interleave(self.scale_block[1], 1)[
            :, :inner
        ]
        return self.codes.float() * scales


QuantizedWeight = GroupedWeight | Float8Weight


def has_same_input_order(a: Tensor | None, b: Tensor | None) -> bool:
    """Of two weights' inputs."""
    return a is b if a is None or b is None else torch.equal(a, b)


@dataclass(frozen=True, slots=True)
class RoundedActivations:
    """Rows in the codes that linears of `rounding` multiply."""

    codes: Tensor
    """[rows, in], integers or the bits of 8-bit floats."""
    scales: Tensor
    """float32, as the form has them."""
    rounding: ActivationRounding
    dtype: torch.dtype
    """Of the numbers before, and of what linears give."""
    unrounded: Tensor | None
    """The same rows before they were rounded; None: no linear reads these."""

    def __len__(self) -> int:
        return len(self.codes)

    @property
    def device(self) -> torch.device:
        return self.codes.device


Activations = Tensor | RoundedActivations
"""What linears read."""


class ActivationRounding(ABC):
    """A way to have rows in 8 bits. What is rounded are always numbers of the model's type, as if the norm or the gate
    had given these first: the bits are those of rounding them afterwards. Two that are equal give the same."""

    @abstractmethod
    def norm_and_round(
        self, x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float, *, whole: bool
    ) -> tuple[RoundedActivations, Tensor]:
        """(the norm of x + residual, x + residual), all [T, hidden]; without a residual of x. An RMSNorm where there is
        no bias, else a LayerNorm. whole: linears read it unrounded as well. May overwrite x and residual."""

    @abstractmethod
    def gate_and_round(self, gate_up: Tensor, *, gelu: bool, whole: bool) -> RoundedActivations:
        """silu(gate) * up for gate_up [T, 2 * F], gate in the first half, or the same with GELU: [T, F]."""


class RoundedInputLinear:
    """A linear that reads Rounded, too, where one of its parts takes x so."""

    def input_roundings(self, rows: int) -> tuple[ActivationRounding | None, ...]:
        """How its parts take so many rows of x; None: unrounded."""
        raise NotImplementedError


def choose_rounding_and_needs_unrounded(readers: Sequence[object], x: Any) -> tuple[ActivationRounding, bool] | None:
    """How what these linears read is to be rounded, of as many rows as x has, and whether one of them reads it
    unrounded as well, or rounded otherwise; None: it is not. What several read alike is rounded once."""
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
    """x, which may be Rounded, as this linear reads it."""
    return x.unrounded if isinstance(x, RoundedActivations) and not isinstance(linear, RoundedInputLinear) else x
