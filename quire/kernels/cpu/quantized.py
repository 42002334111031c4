"""Linears of quantized weights (quantized.cpp): integer products of x, which is quantized as it comes."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from quire.kernels.cpu import native
from quire.kernels.cpu.linear import CompiledLinear
from quire.kernels.quantized import GroupedWeight, QuantizedWeight, same_order

_MOST_IN_BLOCK = 96
"""Inputs of x that share a scale, as in quantized.h: docs/cpu.md has what more of them gain and cost."""

_OUTLIERS = {"8": math.inf, "auto": 0.4, "16": 0.0}
"""By activation bits: blocks of a row's inputs whose largest is above so many times the root of the mean square of all
blocks' have 16 bits, the others 8. docs/quantization.md has what it gains and costs."""


def supported(weights: Sequence[QuantizedWeight]) -> Sequence[GroupedWeight] | None:
    """The weights, if the integer kernels can compute with them as one linear."""
    grouped = [each for each in weights if isinstance(each, GroupedWeight)]
    if len(grouped) < len(weights) or not all(same_order(each.order, grouped[0].order) for each in grouped):
        return None
    return grouped if all(each.scales.shape[1] == 1 or each.group % 16 == 0 for each in grouped) else None


class QuantizedLinear(CompiledLinear):
    """Of weights that are `supported`, their outputs side by side. x is rounded to 8 or 16 bits (_OUTLIERS) in blocks
    that share a scale; `bias` is added in float32."""

    def __init__(
        self,
        library: native.Native,
        weights: Sequence[GroupedWeight],
        bias: Tensor | None,
        *,
        dtype: torch.dtype,
        wide: bool,
        activation_bits: str,
    ) -> None:
        weights = _joined(weights)
        outs, given = sum(each.shape[0] for each in weights), weights[0].shape[1]
        self._look_up = library.look_up[dtype]
        self.block = _block(weights, given)
        inner = -(-given // self.block) * self.block
        self._packed = [_pack(library, each, inner) for each in weights]
        self._bias = None if bias is None else bias.float().contiguous()
        order = weights[0].order
        self._order = None if order is None else order.int().contiguous()
        self._parts = (native.QuantizedPart * len(weights))(*(each.native for each in self._packed))
        pointers = [None if each is None else each.data_ptr() for each in (self._bias, self._order)]
        self._quantized = native.QuantizedLinear(
            self._parts, pointers[1], len(weights), self.block, _OUTLIERS[activation_bits]
        )
        sizes = (given, outs, 0, wide)
        linear = native.PackedLinear(None, pointers[0], *sizes, ctypes.pointer(self._quantized), None)
        super().__init__(library, linear, dtype)

    @property
    def nbytes(self) -> int:
        """Of codes and scales."""
        return sum(each.memory.nbytes + each.factors.nbytes for each in self._packed)

    def held(self, own: native.PackedLinear) -> list[tuple[int, Tensor]]:
        where = native.QuantizedPart.packed.offset
        pairs = zip(self._parts, self._packed, strict=True)
        return [(ctypes.addressof(part) + where, packed.memory) for part, packed in pairs]

    def look_up(self, ids: Tensor) -> Tensor:
        """Rows of the weight, [ids, in] in the dtype of x."""
        assert len(self._packed) == 1, "a table is one weight"
        ids = ids.long().contiguous()
        out = torch.empty((len(ids), self.inner), dtype=self.dtype)
        self._look_up(self._pointer, ids.data_ptr(), out.data_ptr(), len(ids))
        return out


@dataclass(frozen=True, slots=True)
class _Packed:
    native: native.QuantizedPart
    memory: Tensor
    factors: Tensor


def _pack(library: native.Native, weight: GroupedWeight, inner: int) -> _Packed:
    outs, width = weight.shape
    factors, scales, offsets = weight.half_scales()
    halves = [each.contiguous() for each in (scales, offsets) if each is not None]
    part = native.QuantizedPart(None, factors.data_ptr(), outs, weight.bits)
    part.group = inner if weight.scales.shape[1] == 1 else weight.group
    part.scales, part.offsets = len(halves) > 0, len(halves) > 1
    values = range(-8, 8) if weight.values is None else weight.values
    part.table[:] = [value + 128 for value in values]
    memory = library.weights.empty(library.quantized_size(ctypes.addressof(part), inner))
    part.packed = memory.data_ptr()
    pointers = [each.data_ptr() for each in halves] + [None] * (2 - len(halves))
    codes = weight.codes.contiguous()
    threads = torch.get_num_threads()
    library.pack_quantized(ctypes.addressof(part), codes.data_ptr(), *pointers, width, inner, threads)
    return _Packed(part, memory, factors)


def _block(weights: Sequence[GroupedWeight], inner: int) -> int:
    """Inputs of x that share a scale: as many as the weights' groups allow, up to _MOST_IN_BLOCK."""
    common = math.gcd(*(each.group for each in weights if each.scales.shape[1] > 1)) or inner
    sizes = [size for size in range(16, _MOST_IN_BLOCK + 1, 16) if common % size == 0]
    return max(sizes, default=64)  # one group for all inputs, however many: they are padded


def _joined(weights: Sequence[GroupedWeight]) -> list[GroupedWeight]:
    """Neighbours whose codes are alike as one."""
    joined = list(weights[:1])
    for each in weights[1:]:
        last = joined[-1]
        alike = (each.bits, each.group, each.values) == (last.bits, last.group, last.values)
        if not alike or (each.offsets is None) != (last.offsets is None):
            joined.append(each)
            continue
        offsets = None if each.offsets is None or last.offsets is None else torch.cat((last.offsets, each.offsets))
        codes, scales = torch.cat((last.codes, each.codes)), torch.cat((last.scales, each.scales))
        joined[-1] = replace(last, codes=codes, scales=scales, offsets=offsets)
    return joined
