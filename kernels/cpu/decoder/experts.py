"""Mixtures of experts, as experts.cpp computes them."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from quire.kernels.activation import KINDS
from quire.kernels.backend import NO_ADAPTERS, Experts, Linear, LinearContext
from quire.kernels.cpu import native
from quire.kernels.cpu.decoder.mapped import Held, MappedArena
from quire.kernels.cpu.linear import CompiledLinear
from quire.kernels.routing import WEIGHTS, Routing


def compiled_mixture(library: native.Native, experts: Experts) -> Linear | None:
    """None where a linear is not one of ours."""
    linears = [experts.router, *experts.gate_up, *experts.down]
    ours = [each for each in linears if isinstance(each, CompiledLinear)]
    if len(ours) < len(linears):
        return None
    made = CompiledMixture(library, experts, *ours)
    if isinstance(library.weights, MappedArena):
        library.weights.mixtures.append((made.native, made.held))
    return made


def _native(rule: Routing, correction: Tensor | None) -> native.Routing:
    if correction is not None and (correction.dtype != torch.float32 or not correction.is_contiguous()):
        raise TypeError("a router's correction must be float32 and contiguous")
    counts = (rule.per_token, WEIGHTS.index(rule.weights), rule.normalized)
    groups = (rule.groups, rule.groups_kept, rule.group_best)
    numbers = (rule.added, rule.scale, rule.softcap or 0.0, rule.jitter)
    return native.Routing(None if correction is None else correction.data_ptr(), *counts, *groups, *numbers)


class CompiledMixture:
    """Of linears that are all compiled, and have no room for adapters."""

    def __init__(
        self, library: native.Native, experts: Experts, router: CompiledLinear, *linears: CompiledLinear
    ) -> None:
        """`linears`: each expert's gate_up, then each one's down."""
        self._keeps = experts  # alive: what the pointers below point to
        self._hidden, self._dtype, held = router.inner, linears[0].dtype, len(experts.down)
        self._gate_up, self._down = (
            (native.PackedLinear * held)(*(each.native for each in some)) for some in (linears[:held], linears[held:])
        )
        clamp = (0.0, 0.0) if experts.clamp is None else (experts.clamp.alpha, experts.clamp.limit)
        rules = (_native(experts.routing, experts.correction), router.outs, experts.first, held, experts.float_router)
        kind = -1 if experts.activation is None else KINDS.index(experts.activation.kind)
        self.native = native.Experts(ctypes.pointer(router.native), self._gate_up, self._down, *rules, *clamp, kind)
        self._kernel = library.mix_experts[self._dtype]
        pairs = zip((*self._gate_up, *self._down), linears, strict=True)
        each = [[Held(*weights) for weights in linear.held(own)] for own, linear in pairs]
        self.held = [up + down for up, down in zip(each[:held], each[held:], strict=True)]
        """The packed weights of each expert."""

    def __call__(self, x: Tensor, context: LinearContext = NO_ADAPTERS) -> Tensor:
        if x.dtype != self._dtype or x.shape[1] != self._hidden:
            raise TypeError(f"experts of {self._dtype} from {self._hidden} cannot take {list(x.shape)} of {x.dtype}")
        x = x.contiguous()
        out = torch.empty_like(x)
        self._kernel(ctypes.addressof(self.native), x.data_ptr(), out.data_ptr(), len(x), torch.get_num_threads())
        return out
