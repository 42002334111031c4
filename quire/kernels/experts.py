"""A mixture of experts in plain PyTorch: the judge of kernels/cpu/decoder/experts.cpp. And what keeps the weights of
experts on a disk, of which a step reads those that its tokens choose."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from quire.kernels.backend import NO_ADAPTERS
from quire.kernels.routing import Experts, route
from quire.kernels.streaming.offload import Offload

if TYPE_CHECKING:
    from quire.kernels.backend import Backend


class ReferenceMixture:
    """Expert by expert: each multiplies the rows that chose it, and adds to their sums. So a row's sum has an order of
    its own, whatever the other rows chose."""

    def __init__(self, backend: Backend, experts: Experts) -> None:
        """`backend`: computes the gates."""
        self._backend = backend
        self._experts = experts

    def __call__(self, x: Tensor, routed: Tensor | None = None) -> Tensor:
        """routed: what the router reads; None: x."""
        experts = self._experts
        chosen, shares, _ = choose(experts, x if routed is None else routed)
        total = torch.zeros(x.shape, dtype=shares.dtype, device=x.device)
        for expert in chosen.unique().tolist():
            if not 0 <= (place := expert - experts.first) < len(experts.down):
                continue
            rows, rank = (chosen == expert).nonzero(as_tuple=True)
            share = shares[rows, rank, None]
            read = (x[rows] * share).to(x.dtype) if experts.routing.inputs else x[rows]
            gated = between(self._backend, experts, experts.gate_up[place](read, NO_ADAPTERS))
            given = experts.down[place](gated, NO_ADAPTERS)
            total[rows] += given if experts.routing.inputs else given * share
        return total.to(x.dtype)


def choose(experts: Experts, x: Tensor) -> tuple[Tensor, Tensor, int]:
    """Each token's experts [T, per_token] int64 and their weights, for what the router reads, [T, hidden]; and how many
    experts there are, those of other ranks too."""
    scores = experts.router(x.float() if experts.float_router else x, NO_ADAPTERS)
    chosen, shares = route(scores, experts.routing, experts.correction)
    return chosen, shares if experts.factors is None else shares * experts.factors[chosen], scores.shape[1]


def between(backend: Backend, experts: Experts, gate_up: Tensor) -> Tensor:
    """What stands between an expert's two matrices, for what the first one gives."""
    if experts.activation is not None:
        return backend.activate(gate_up, experts.activation)
    if experts.gelu:
        return backend.gelu_mul(gate_up)
    return backend.silu_mul(gate_up) if experts.clamp is None else backend.clamped_mul(gate_up, experts.clamp)


class ExpertsOnDisk(Offload):
    """Routed experts in a file, which it mixes too. What mixes them is made before `settle`, which raises ValueError
    also where the memory for those that are kept has no room for one."""
