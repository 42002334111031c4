"""Integer products with x, which is quantized on the fly."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from quire.kernels.cpu import native_library
from quire.kernels.cpu.linear import CompiledLinearBase
from quire.kernels.quantized_tensors import GroupedWeight, QuantizedWeight, has_same_input_order

_MAX_SCALE_BLOCK = 96
"""Maximum inputs of x per scale, the same as in quantized.h."""

_OUTLIER_THRESHOLDS = {"8": math.inf, "auto": 0.4, "16": 0.0}
"""The keys are values of activation_bits. A block of x is rounded to 16 bits instead of 8 if its largest absolute value
exceeds the threshold times the root mean square of these values of all blocks in the row.
"""


def as_grouped_weights(weights: Sequence[QuantizedWeight]) -> Sequence[GroupedWeight] | None:
    grouped = [each for each in weights if isinstance(each, GroupedWeight)]
    if len(grouped) < len(weights) or not all(
        has_same_input_order(each.input_order, grouped[0].input_order) for each in grouped
    ):
        return None
    return grouped if all(each.scales.shape[1] == 1 or each.group_size % 16 == 0 for each in grouped) else None


class CompiledQuantizedLinear(CompiledLinearBase):
    """Rounds x to 8 or 16 bits in blocks that share a scale. `bias` is added in float32."""

    def __init__(
        self,
        library: native_library.NativeLibrary,
        weights: Sequence[GroupedWeight],
        bias: Tensor | None,
        *,
        dtype: torch.dtype,
        wide: bool,
        activation_bits: str,
    ) -> None:
        weights = _merge_adjacent_weights(weights)
        outs, num_inputs = sum(each.shape[0] for each in weights), weights[0].shape[1]
        self._look_up = library.look_up[dtype]
        self.activation_block_size = _choose_activation_block_size(weights, num_inputs)
        inner = -(-num_inputs // self.activation_block_size) * self.activation_block_size
        self._packed = [_pack_part(library, each, inner) for each in weights]
        self._bias = None if bias is None else bias.float().contiguous()
        order = weights[0].input_order
        self._order = None if order is None else order.int().contiguous()
        self._parts = (native_library.QuantizedPart * len(weights))(*(each.native for each in self._packed))
        pointers = [None if each is None else each.data_ptr() for each in (self._bias, self._order)]
        self._quantized = native_library.QuantizedLinear(
            self._parts, pointers[1], len(weights), self.activation_block_size, _OUTLIER_THRESHOLDS[activation_bits]
        )
        sizes = (num_inputs, outs, 0, wide)
        linear = native_library.PackedLinear(None, pointers[0], *sizes, ctypes.pointer(self._quantized), None)
        super().__init__(library, linear, dtype)

    @property
    def nbytes(self) -> int:
        return sum(each.memory.nbytes + each.factors.nbytes for each in self._packed)

    def pointer_addresses_and_weights(self, struct: native_library.PackedLinear) -> list[tuple[int, Tensor]]:
        where = native_library.QuantizedPart.packed.offset
        pairs = zip(self._parts, self._packed, strict=True)
        return [(ctypes.addressof(part) + where, packed.memory) for part, packed in pairs]

    def look_up_rows(self, ids: Tensor) -> Tensor:
        """Return dequantized rows [ids, in] in x's dtype."""
        assert len(self._packed) == 1, "a table is one weight"
        ids = ids.long().contiguous()
        out = torch.empty((len(ids), self.in_features), dtype=self.dtype)
        self._look_up(self._pointer, ids.data_ptr(), out.data_ptr(), len(ids))
        return out


@dataclass(frozen=True, slots=True)
class _PackedPart:
    native: native_library.QuantizedPart
    memory: Tensor
    factors: Tensor


def _pack_part(library: native_library.NativeLibrary, weight: GroupedWeight, inner: int) -> _PackedPart:
    outs, width = weight.shape
    multiples = None
    if weight.nested:
        factors, halves, multiples = weight.to_factors_and_nested_halves()
    else:
        factors, scales, offsets = weight.to_factors_and_half_scales()
        halves = [each for each in (scales, offsets) if each is not None]
    halves = [each.contiguous() for each in halves]
    multiples = None if multiples is None else multiples.contiguous()
    part = native_library.QuantizedPart(None, factors.data_ptr(), outs, _held_bits(weight))
    part.group = inner if weight.scales.shape[1] == 1 else weight.group_size
    part.scales, part.offsets = len(halves) > 0, len(halves) > 1
    part.nested = _nested_block_size(weight)
    values = list(range(-8, 8)) if weight.code_values is None else list(weight.code_values)
    values += [0] * (2**part.bits - len(values)) if part.bits < 8 else []
    low_bits_table = [values[code % len(values)] + 128 for code in range(16)]
    part.table[0][:] = low_bits_table
    part.table[1][:] = [low_bits_table[code // 4] for code in range(16)]
    memory = library.weight_arena.allocate_bytes(library.quantized_size(ctypes.addressof(part), inner))
    part.packed = memory.data_ptr()
    pointers = [each.data_ptr() for each in halves] + [None] * (2 - len(halves))
    pointers.append(None if multiples is None else multiples.data_ptr())
    codes = weight.codes.contiguous()
    threads = torch.get_num_threads()
    library.pack_quantized(ctypes.addressof(part), codes.data_ptr(), *pointers, width, inner, threads)
    return _PackedPart(part, memory, factors)


def _held_bits(weight: GroupedWeight) -> int:
    count = 16 if weight.code_values is None else len(weight.code_values)
    return weight.bits if weight.bits == 8 or count > 8 else 3 if count > 4 else 2


def _choose_activation_block_size(weights: Sequence[GroupedWeight], inner: int) -> int:
    common = math.gcd(*(each.group_size for each in weights if each.scales.shape[1] > 1)) or inner
    sizes = [size for size in range(16, _MAX_SCALE_BLOCK + 1, 16) if common % size == 0]
    return max(sizes, default=64)  # possible only if all inputs are one group, which is padded


def _merge_adjacent_weights(weights: Sequence[GroupedWeight]) -> list[GroupedWeight]:
    merged = list(weights[:1])
    for each in weights[1:]:
        last = merged[-1]
        same_format = (each.bits, each.group_size, each.code_values) == (last.bits, last.group_size, last.code_values)
        same_nesting = _nested_block_size(each) == _nested_block_size(last)
        if not same_format or not same_nesting or (each.offsets is None) != (last.offsets is None):
            merged.append(each)
            continue
        offsets = None if each.offsets is None or last.offsets is None else torch.cat((last.offsets, each.offsets))
        codes, scales = torch.cat((last.codes, each.codes)), torch.cat((last.scales, each.scales))
        nested = tuple(a.append_outputs(b) for a, b in zip(last.nested, each.nested, strict=True))
        merged[-1] = replace(last, codes=codes, scales=scales, offsets=offsets, nested=nested)
    return merged


def _nested_block_size(weight: GroupedWeight) -> int:
    return weight.group_size * weight.nested[0].groups_per_block if weight.nested else 0
