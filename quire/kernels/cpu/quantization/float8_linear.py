from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from quire.kernels.cpu import native_library
from quire.kernels.cpu.linear import CompiledLinearBase
from quire.kernels.quantized_tensors import Float8Weight, QuantizedWeight

_PANEL_OUTPUTS = 64


def as_float8_weights(weights: Sequence[QuantizedWeight]) -> Sequence[Float8Weight] | None:
    floats = [each for each in weights if isinstance(each, Float8Weight)]
    if len(floats) < len(weights):
        return None
    inner, blocks = weights[0].shape[1], {each.inputs_per_scale for each in floats}
    return floats if len(blocks) == 1 and inner % 4 == 0 and not any(block % 4 for block in blocks) else None


class Float8Linear(CompiledLinearBase):
    """Multiplies float8 weights by unrounded x, as bfloat16 products. `bias` is added in float32."""

    def __init__(
        self,
        library: native_library.NativeLibrary,
        weights: Sequence[Float8Weight],
        bias: Tensor | None,
        *,
        dtype: torch.dtype,
        wide: bool,
    ) -> None:
        outs, inner = sum(each.shape[0] for each in weights), weights[0].shape[1]
        padded = -(-outs // _PANEL_OUTPUTS) * _PANEL_OUTPUTS
        self._codes = library.weight_arena.allocate_bytes(padded * inner)
        codes = torch.cat([each.codes.view(torch.uint8) for each in weights]).contiguous()
        library.pack_float8(codes.data_ptr(), self._codes.data_ptr(), inner, outs, torch.get_num_threads())
        scales = torch.cat([each.scales_per_output_row() for each in weights])
        scales = torch.nn.functional.pad(scales, (0, 0, 0, padded - outs))
        self._scales = scales.unflatten(0, (-1, _PANEL_OUTPUTS)).transpose(1, 2).contiguous()
        self._bias = None if bias is None else bias.float().contiguous()
        self._float8 = native_library.Float8Linear(
            self._codes.data_ptr(), self._scales.data_ptr(), weights[0].inputs_per_scale
        )
        bias_ptr = None if self._bias is None else self._bias.data_ptr()
        linear = native_library.PackedLinear(None, bias_ptr, inner, outs, 0, wide, None, ctypes.pointer(self._float8))
        super().__init__(library, linear, dtype)

    def pointer_addresses_and_weights(self, struct: native_library.PackedLinear) -> list[tuple[int, Tensor]]:
        return [(ctypes.addressof(self._float8) + native_library.Float8Linear.packed.offset, self._codes)]

    @property
    def nbytes(self) -> int:
        return self._codes.nbytes + self._scales.nbytes
