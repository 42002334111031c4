"""Mixtures of experts, as experts.cpp computes them."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from quire.kernels.backend import Experts, Mixture
from quire.kernels.cpu import native
from quire.kernels.cpu.linear import CompiledLinear


def compiled_mixture(library: native.Native, experts: Experts) -> Mixture | None:
    """None where a linear is not one of ours."""
    linears = [each for each in (experts.router, *experts.gate_up, *experts.down) if isinstance(each, CompiledLinear)]
    count = len(experts.down)
    if len(linears) < 1 + 2 * count:
        return None
    return CompiledMixture(library, experts, linears[0], linears[1 : 1 + count], linears[1 + count :])


class CompiledMixture:
    """Of linears that are all compiled, and have no room for adapters."""

    def __init__(
        self,
        library: native.Native,
        experts: Experts,
        router: CompiledLinear,
        gate_up: Sequence[CompiledLinear],
        down: Sequence[CompiledLinear],
    ) -> None:
        self._keeps = experts  # alive: what the pointers below point to
        self._hidden, self._dtype = router.inner, router.dtype
        self._gate_up, self._down = _natives(gate_up), _natives(down)
        counts = (len(down), experts.per_token, experts.normalized)
        clamp = (0.0, 0.0) if experts.clamp is None else (experts.clamp.alpha, experts.clamp.limit)
        self.native = native.Experts(ctypes.pointer(router.native), self._gate_up, self._down, *counts, *clamp)
        self._pointer = ctypes.addressof(self.native)
        self._kernel = library.mix_experts[self._dtype]

    def __call__(self, x: Tensor) -> Tensor:
        if x.dtype != self._dtype or x.shape[1] != self._hidden:
            raise TypeError(f"experts of {self._dtype} from {self._hidden} cannot take {list(x.shape)} of {x.dtype}")
        x = x.contiguous()
        out = torch.empty_like(x)
        self._kernel(self._pointer, x.data_ptr(), out.data_ptr(), len(x), torch.get_num_threads())
        return out


def _natives(linears: Sequence[CompiledLinear]) -> ctypes.Array[native.PackedLinear]:
    return (native.PackedLinear * len(linears))(*(each.native for each in linears))
