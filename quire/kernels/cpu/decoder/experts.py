"""Mixtures of experts, as experts.cpp computes them."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from quire.kernels.activation import KINDS
from quire.kernels.cpu import native
from quire.kernels.cpu.decoder.mapped import Held, MappedArena
from quire.kernels.cpu.linear import CompiledLinear
from quire.kernels.routing import WEIGHTS, Experts, Mixture, Routing


def compiled_mixture(library: native.Native, experts: Experts) -> Mixture | None:
    """None where a linear is not one of ours."""
    linears = [experts.router, *experts.gate_up, *experts.down]
    ours = [each for each in linears if isinstance(each, CompiledLinear)]
    if len(ours) < len(linears):
        return None
    made = CompiledMixture(library, experts, *ours)
    if isinstance(library.weights, MappedArena):
        library.weights.mixtures.append((made.native, made.held))
    return made


def _native(rule: Routing, correction: Tensor | None, factors: Tensor | None) -> native.Routing:
    given = (correction, factors)
    if any(each is not None and (each.dtype != torch.float32 or not each.is_contiguous()) for each in given):
        raise TypeError("a router's correction and factors must be float32 and contiguous")
    pointers = (None if each is None else each.data_ptr() for each in given)
    counts = (rule.per_token, WEIGHTS.index(rule.weights), rule.normalized)
    groups = (rule.groups, rule.groups_kept, rule.group_best, rule.inputs)
    numbers = (rule.added, rule.scale, rule.softcap or 0.0, rule.jitter)
    return native.Routing(*pointers, *counts, *groups, *numbers)


class CompiledMixture:
    """Of linears that are all compiled, and have no room for adapters."""

    def __init__(
        self, library: native.Native, experts: Experts, router: CompiledLinear, *linears: CompiledLinear
    ) -> None:
        """`linears`: each expert's gate_up, then each one's down."""
        self._keeps = experts  # alive: what the pointers below point to
        self._dtype, held = linears[0].dtype, len(experts.down)
        self._widths = linears[0].inner, router.inner
        self._gate_up, self._down = (
            (native.PackedLinear * held)(*(each.native for each in some)) for some in (linears[:held], linears[held:])
        )
        clamp = (0.0, 0.0) if experts.clamp is None else (experts.clamp.alpha, experts.clamp.limit)
        routing = _native(experts.routing, experts.correction, experts.factors)
        rules = (routing, router.outs, experts.first, held, experts.float_router)
        kind = -1 if experts.activation is None else KINDS.index(experts.activation.kind)
        gates = (*clamp, kind, experts.gelu)
        self.native = native.Experts(ctypes.pointer(router.native), self._gate_up, self._down, *rules, *gates)
        self._kernel = library.mix_experts[self._dtype]
        pairs = zip((*self._gate_up, *self._down), linears, strict=True)
        each = [[Held(*weights) for weights in linear.held(own)] for own, linear in pairs]
        self.held = [up + down for up, down in zip(each[:held], each[held:], strict=True)]
        """The packed weights of each expert."""

    def __call__(self, x: Tensor, routed: Tensor | None = None) -> Tensor:
        """routed: what the router reads; None: x."""
        routed = x if routed is None else routed
        for each, width in zip((x, routed), self._widths, strict=True):
            if each.dtype != self._dtype or each.shape != (len(x), width):
                shape = f"{list(each.shape)} of {each.dtype}"
                raise TypeError(f"experts of {self._dtype} from {width} cannot take {shape}")
        x, routed = x.contiguous(), routed.contiguous()
        out = torch.empty_like(x)
        pointers = (each.data_ptr() for each in (x, routed, out))
        self._kernel(ctypes.addressof(self.native), *pointers, len(x), torch.get_num_threads())
        return out
