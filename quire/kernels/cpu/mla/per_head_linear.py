from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from quire.kernels.backend import Linear, LinearContext
from quire.kernels.cpu import native_library
from quire.kernels.cpu.linear import CompiledLinearBase


def make_compiled_per_head_linear(
    library: native_library.NativeLibrary, linears: Sequence[Linear], passthrough_dim: int
) -> Linear | None:
    ours = [each for each in linears if isinstance(each, CompiledLinearBase)]
    return CompiledPerHeadLinear(library, ours, passthrough_dim) if len(ours) == len(linears) else None


class CompiledPerHeadLinear:
    """All linears must be compiled, with equal numbers of inputs and equal numbers of outputs."""

    def __init__(
        self, library: native_library.NativeLibrary, linears: Sequence[CompiledLinearBase], passthrough_dim: int
    ) -> None:
        self._linear_refs = linears  # keeps the targets of the pointers below alive
        first, count = linears[0], len(linears)
        self.dtype = first.dtype
        self.in_features = count * (first.in_features + passthrough_dim)
        self.out_features = count * (first.out_features + passthrough_dim)
        self._linears = (native_library.PackedLinear * count)(*(each.native for each in linears))
        self.native = native_library.PerHeadLinear(self._linears, count, passthrough_dim)
        self._kernel = library.linear_blocks[self.dtype]

    def __call__(self, x: Tensor, context: LinearContext) -> Tensor:
        if x.dtype != self.dtype or x.shape[1] != self.in_features:
            raise TypeError(f"blocks of {self.dtype} from {self.in_features} cannot take {list(x.shape)} of {x.dtype}")
        x = x.contiguous()
        out = x.new_empty((len(x), self.out_features))
        self._kernel(ctypes.addressof(self.native), x.data_ptr(), out.data_ptr(), len(x), torch.get_num_threads())
        return out
