from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from quire.kernels.cpu import native_library
from quire.kernels.cpu.decoder.mapped_experts import MappedWeightArena, RelocatableWeights
from quire.kernels.cpu.linear import CompiledLinearBase
from quire.kernels.parameters.activation import ACTIVATION_KINDS
from quire.kernels.parameters.routing import COMPILED_SCORE_FUNCTIONS, Routing
from quire.kernels.routing import MoE, MoEComponents


def make_compiled_moe(library: native_library.NativeLibrary, experts: MoEComponents) -> MoE | None:
    linears = [experts.router, *experts.gate_up, *experts.down]
    ours = [each for each in linears if isinstance(each, CompiledLinearBase)]
    if len(ours) < len(linears) or experts.routing.score_function not in COMPILED_SCORE_FUNCTIONS:
        return None
    moe = CompiledMoE(library, experts, *ours)
    if isinstance(library.weight_arena, MappedWeightArena):
        library.weight_arena.moes.append((moe.native, moe.expert_buffers))
    return moe


def _native_routing(rule: Routing, correction: Tensor | None, factors: Tensor | None) -> native_library.Routing:
    bias_and_scales = (correction, factors)
    if any(each is not None and (each.dtype != torch.float32 or not each.is_contiguous()) for each in bias_and_scales):
        raise TypeError("a router's correction and factors must be float32 and contiguous")
    pointers = (None if each is None else each.data_ptr() for each in bias_and_scales)
    counts = (rule.top_k, COMPILED_SCORE_FUNCTIONS.index(rule.score_function), rule.is_normalized)
    groups = (rule.num_groups, rule.top_k_groups, rule.group_score_top_k, rule.weights_inputs)
    numbers = (rule.normalizer_eps, rule.scale, rule.softcap or 0.0, rule.jitter)
    return native_library.Routing(*pointers, *counts, *groups, *numbers)


class CompiledMoE:
    """All linears must be compiled and have no adapter slots."""

    def __init__(
        self,
        library: native_library.NativeLibrary,
        experts: MoEComponents,
        router: CompiledLinearBase,
        *linears: CompiledLinearBase,
    ) -> None:
        """`linears` has all gate_up linears, then all down linears, in expert order."""
        self._experts = experts  # keeps alive the memory that the pointers below point to
        self._dtype, num_experts = linears[0].dtype, len(experts.down)
        self._widths = linears[0].in_features, router.in_features
        self._gate_up, self._down = (
            (native_library.PackedLinear * num_experts)(*(each.native for each in some))
            for some in (linears[:num_experts], linears[num_experts:])
        )
        clamp = (
            (0.0, 0.0)
            if experts.clamped_swiglu is None
            else (experts.clamped_swiglu.alpha, experts.clamped_swiglu.limit)
        )
        routing = _native_routing(experts.routing, experts.score_correction_bias, experts.expert_scales)
        rules = (routing, router.out_features, experts.first_expert, num_experts, experts.has_float32_router)
        kind = -1 if experts.activation is None else ACTIVATION_KINDS.index(experts.activation.kind)
        gates = (*clamp, kind, experts.has_gelu_gates)
        self.native = native_library.Experts(ctypes.pointer(router.native), self._gate_up, self._down, *rules, *gates)
        self._kernel = library.mix_experts[self._dtype]
        pairs = zip((*self._gate_up, *self._down), linears, strict=True)
        each = [
            [RelocatableWeights(*weights) for weights in linear.pointer_addresses_and_weights(struct)]
            for struct, linear in pairs
        ]
        self.expert_buffers = [up + down for up, down in zip(each[:num_experts], each[num_experts:], strict=True)]

    def __call__(self, x: Tensor, router_input: Tensor | None = None) -> Tensor:
        """Raises TypeError for a wrong shape or dtype."""
        router_input = x if router_input is None else router_input
        for each, width in zip((x, router_input), self._widths, strict=True):
            if each.dtype != self._dtype or each.shape != (len(x), width):
                shape = f"{list(each.shape)} of {each.dtype}"
                raise TypeError(f"experts of {self._dtype} from {width} cannot take {shape}")
        x, router_input = x.contiguous(), router_input.contiguous()
        out = torch.empty_like(x)
        pointers = (each.data_ptr() for each in (x, router_input, out))
        self._kernel(ctypes.addressof(self.native), *pointers, len(x), torch.get_num_threads())
        return out
