"""Calls linear_blocks.cpp, and says what latent_store.cpp takes."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from quire.kernels.backend import Linear, LinearContext
from quire.kernels.cpu import native
from quire.kernels.cpu.linear import CompiledLinear
from quire.kernels.latents.latent import MOST_ROTATED, Latent


def check_latent(latent: Latent) -> None:
    """Raise TypeError, or ValueError, for what the kernel does not take."""
    if latent.norm.dtype != torch.float32 or latent.cos_sin.dtype != torch.float32:
        raise TypeError("the norm and the rotation of latents must be float32")
    size, rotated = latent.sizes
    if size % 2 or not 2 <= rotated <= MOST_ROTATED or not latent.cos_sin.is_contiguous():
        raise ValueError(f"a latent must be even, and its key of 2 to {MOST_ROTATED} numbers, not {size} and {rotated}")


def compiled_blocks(library: native.Native, linears: Sequence[Linear], passed: int) -> Linear | None:
    """None where a linear is not one of ours."""
    ours = [each for each in linears if isinstance(each, CompiledLinear)]
    return CompiledBlocks(library, ours, passed) if len(ours) == len(linears) else None


class CompiledBlocks:
    """Linears of as many inputs and outputs, which are all compiled."""

    def __init__(self, library: native.Native, linears: Sequence[CompiledLinear], passed: int) -> None:
        self._keeps = linears  # alive: what the pointers below point to
        first, count = linears[0], len(linears)
        self.dtype, self.inner, self.outs = first.dtype, count * (first.inner + passed), count * (first.outs + passed)
        self._linears = (native.PackedLinear * count)(*(each.native for each in linears))
        self.native = native.LinearBlocks(self._linears, count, passed)
        self._kernel = library.linear_blocks[self.dtype]

    def __call__(self, x: Tensor, context: LinearContext) -> Tensor:
        if x.dtype != self.dtype or x.shape[1] != self.inner:
            raise TypeError(f"blocks of {self.dtype} from {self.inner} cannot take {list(x.shape)} of {x.dtype}")
        x = x.contiguous()
        out = x.new_empty((len(x), self.outs))
        self._kernel(ctypes.addressof(self.native), x.data_ptr(), out.data_ptr(), len(x), torch.get_num_threads())
        return out
