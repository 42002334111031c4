"""A mixture of experts in plain PyTorch: the judge of kernels/cpu/decoder/experts.cpp."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from quire.kernels.backend import NO_ADAPTERS, Experts, LinearContext

if TYPE_CHECKING:
    from quire.kernels.backend import Backend


class ReferenceMixture:
    """Expert by expert: each multiplies the rows that chose it, and adds to their sums. So a row's sum has an order of
    its own, whatever the other rows chose."""

    def __init__(self, backend: Backend, experts: Experts) -> None:
        """`backend`: computes the gates."""
        self._backend = backend
        self._experts = experts

    def __call__(self, x: Tensor, context: LinearContext = NO_ADAPTERS) -> Tensor:
        experts, backend = self._experts, self._backend
        chosen, shares = choose(experts.router(x, NO_ADAPTERS), experts.per_token, normalized=experts.normalized)
        total = torch.zeros(x.shape, dtype=shares.dtype, device=x.device)
        for expert in chosen.unique().tolist():
            rows, rank = (chosen == expert).nonzero(as_tuple=True)
            gate_up = experts.gate_up[expert](x[rows], NO_ADAPTERS)
            gated = backend.silu_mul(gate_up) if experts.clamp is None else backend.clamped_mul(gate_up, experts.clamp)
            total[rows] += experts.down[expert](gated, NO_ADAPTERS) * shares[rows, rank, None]
        return total.to(x.dtype)


def choose(scores: Tensor, count: int, *, normalized: bool) -> tuple[Tensor, Tensor]:
    """The experts of each token [T, count], those of its highest scores [T, experts] first, and their shares."""
    highest, chosen = scores.sort(dim=-1, descending=True, stable=True)
    highest, chosen = highest[:, :count], chosen[:, :count]
    return chosen, highest.softmax(-1) if normalized else scores.softmax(-1).gather(1, chosen)
