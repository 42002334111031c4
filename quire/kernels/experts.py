from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from quire.kernels.backend import NO_ADAPTERS
from quire.kernels.routing import MoEComponents, choose_experts
from quire.kernels.streaming.weight_offloader import WeightOffloader

if TYPE_CHECKING:
    from quire.kernels.backend import Backend


class ReferenceMoE:
    """Adds a row's experts in the order of their indices, so this order does not depend on other rows."""

    def __init__(self, backend: Backend, experts: MoEComponents) -> None:
        self._backend = backend
        self._experts = experts

    def __call__(self, x: Tensor, router_input: Tensor | None = None) -> Tensor:
        experts = self._experts
        chosen, shares, _ = route_tokens(experts, x if router_input is None else router_input)
        total = torch.zeros(x.shape, dtype=shares.dtype, device=x.device)
        for expert in chosen.unique().tolist():
            if not 0 <= (place := expert - experts.first_expert) < len(experts.down):
                continue
            rows, rank = (chosen == expert).nonzero(as_tuple=True)
            share = shares[rows, rank, None]
            read = (x[rows] * share).to(x.dtype) if experts.routing.weights_inputs else x[rows]
            gated = apply_expert_activation(self._backend, experts, experts.gate_up[place](read, NO_ADAPTERS))
            expert_output = experts.down[place](gated, NO_ADAPTERS)
            total[rows] += expert_output if experts.routing.weights_inputs else expert_output * share
        return total.to(x.dtype)


def route_tokens(experts: MoEComponents, x: Tensor) -> tuple[Tensor, Tensor, int]:
    """Return for router input [T, hidden] the chosen experts [T, top_k] int64, their weights, and the number of experts
    on all ranks.
    """
    scores = experts.router(x.float() if experts.has_float32_router else x, NO_ADAPTERS)
    return (*choose_experts(scores, experts), scores.shape[1])


def apply_expert_activation(backend: Backend, experts: MoEComponents, gate_up: Tensor) -> Tensor:
    if experts.activation is not None:
        return backend.apply_activation(gate_up, experts.activation)
    if experts.has_gelu_gates:
        return backend.gelu_mul(gate_up)
    return (
        backend.silu_mul(gate_up)
        if experts.clamped_swiglu is None
        else backend.clamp_silu_mul(gate_up, experts.clamped_swiglu)
    )


class DiskExperts(WeightOffloader):
    """Experts that stay on disk. Create all MoEs before `finish_loading`, which also raises ValueError if the memory
    for the most used experts is smaller than one expert.
    """
