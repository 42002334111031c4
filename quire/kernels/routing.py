"""MoE components and routing in plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quire.kernels.activation import sigmoid
from quire.kernels.parameters.activation import Activation, ClampedSwiGLU
from quire.kernels.parameters.routing import Routing

LinearFunction = Callable[[Tensor, Any], Tensor]


MoE = Callable[[Tensor, Tensor], Tensor]
"""Maps the experts' and the router's input [rows, hidden] to the weighted sum of the chosen experts' outputs."""


@dataclass(frozen=True, slots=True)
class MoEComponents:
    """A router chooses some of these MLPs for each token (Shazeer et al., 2017)."""

    router: LinearFunction
    """Maps [T, hidden] to scores [T, experts] float32."""
    gate_up: Sequence[LinearFunction]
    down: Sequence[LinearFunction]
    routing: Routing
    clamped_swiglu: ClampedSwiGLU | None = None
    """None: a SiLU gate without limits."""
    activation: Activation | None = None
    """The activation of MLPs without gates. `gate_up` is then the up projection alone."""
    score_correction_bias: Tensor | None = None
    """[experts] float32, added to weights only to choose experts (DeepSeek-V3, 2024)."""
    expert_scales: Tensor | None = None
    """[experts] float32 factors of the final weights."""
    has_gelu_gates: bool = False
    """If True, gates are tanh-approximated GELU instead of SiLU."""
    has_float32_router: bool = False
    first_expert: int = 0
    """Index of the first expert in `gate_up` and `down`. Other ranks have the other experts."""


def choose_experts(scores: Tensor, experts: MoEComponents) -> tuple[Tensor, Tensor]:
    """Return the chosen experts [T, top_k] int64 and their weights for scores [T, experts]."""
    chosen, weights = _apply_rule(scores, experts.routing, experts.score_correction_bias)
    return chosen, weights if experts.expert_scales is None else weights * experts.expert_scales[chosen]


def _apply_rule(scores: Tensor, routing: Routing, correction: Tensor | None) -> tuple[Tensor, Tensor]:
    if routing.softcap is not None:
        scores = (scores / routing.softcap).tanh() * routing.softcap
    if routing.score_function == "mixer":
        return _route_sparse_mixer(scores, routing)
    if routing.score_function == "sigmoid":
        weights = sigmoid(scores)
    elif routing.score_function == "softmax":
        weights = scores.softmax(-1)
    else:
        raise ValueError(f"there is no routing by {routing.score_function!r}")
    # Scores sort like weights, and stay distinct where weights round to 0 or 1.
    wanted = scores if correction is None and routing.group_score_top_k == 1 else weights
    wanted = wanted if correction is None else wanted + correction
    chosen = _top_indices(_mask_to_best_groups(wanted, routing), routing.top_k)
    parts = weights.gather(1, chosen)
    if routing.is_normalized:
        parts = parts / (parts.sum(-1, keepdim=True) + routing.normalizer_eps)
    return chosen, parts if routing.scale == 1 else parts * routing.scale


def _top_indices(wanted: Tensor, count: int) -> Tensor:
    """Return [T, count], largest first."""
    return wanted.sort(dim=-1, descending=True, stable=True).indices[:, :count]


def _mask_to_best_groups(wanted: Tensor, routing: Routing) -> Tensor:
    if routing.num_groups == 1:
        return wanted
    grouped = wanted.unflatten(1, (routing.num_groups, -1))
    best_groups = _top_indices(grouped.topk(routing.group_score_top_k, dim=-1).values.sum(-1), routing.top_k_groups)
    is_best = torch.zeros(grouped.shape[:2], dtype=torch.bool, device=wanted.device).scatter_(1, best_groups, True)
    return grouped.masked_fill(~is_best[:, :, None], -torch.inf).flatten(1)


def _route_sparse_mixer(scores: Tensor, routing: Routing) -> tuple[Tensor, Tensor]:
    left = scores
    chosen = list[Tensor]()
    weights = list[Tensor]()
    for _ in range(routing.top_k):
        chosen.append(_top_indices(left, 1))
        largest = left.gather(1, chosen[-1])
        far = (largest - scores) / scores.abs().maximum(largest) > 2 * routing.jitter
        weights.append(left.masked_fill(far, -torch.inf).softmax(-1).gather(1, chosen[-1]))
        left = left.scatter(1, chosen[-1], -torch.inf)
    return torch.cat(chosen, 1), torch.cat(weights, 1) * routing.scale
