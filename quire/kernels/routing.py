"""A mixture's experts, and how they are chosen by their scores, in plain PyTorch: the judge of
kernels/cpu/decoder/routing.h."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from quire.kernels.activation import Activation, ClampedSwiGLU, sigmoid

LinearFunction = Callable[[Tensor, Any], Tensor]
"""A `Linear` of kernels/backend.py."""
SCORE_FUNCTIONS = ("softmax", "sigmoid", "mixer")
"""By the numbers that kernels/cpu/decoder/routing.h gives them."""


@dataclass(frozen=True, slots=True)
class Routing:
    """How many experts a token has, which, and what part each has of what they give together. Of equal ones the first
    are chosen."""

    top_k: int
    score_function: Literal["softmax", "sigmoid", "mixer"] = "softmax"
    """What a score weighs: its part of a softmax of all; its own sigmoid; or, in the order of the choice, its part of a
    softmax of those that are not chosen before it and not much smaller (SparseMixer: Liu et al., 2024)."""
    is_normalized: bool = True
    """The weights of those that are chosen are divided by their sum. SparseMixer's never are."""
    normalizer_eps: float = 0.0
    """To that sum, so that it is not 0."""
    scale: float = 1.0
    """Factor of all weights, in the end."""
    num_groups: int = 1
    """Experts are in so many groups of equal size, side by side,"""
    top_k_groups: int = 1
    """of which so many are chosen first, and experts among theirs alone (DeepSeek-V2, 2024):"""
    group_score_top_k: Literal[1, 2] = 1
    """those with the largest sums of so many of their best experts."""
    softcap: float | None = None
    """Scores s become c * tanh(s / c)."""
    weights_inputs: bool = False
    """An expert's weight multiplies what it reads, not what it gives (Llama 4, 2025)."""
    jitter: float = 0.0
    """Of SparseMixer: (largest - s) / max(|s|, largest) is at most twice this where s is not much smaller."""

    def invalid_reason(self, count: int) -> str | None:
        """Why so many experts cannot be chosen from like this; None: they can."""
        if self.top_k > count:
            return f"{self.top_k} of {count} experts"
        if count % self.num_groups:
            return f"{count} experts in {self.num_groups} groups"
        if self.top_k_groups > self.num_groups or self.group_score_top_k > count // self.num_groups:
            return f"{self.top_k_groups} of {self.num_groups} groups by their {self.group_score_top_k} best experts"
        if self.top_k > self.top_k_groups * (count // self.num_groups):
            return f"{self.top_k} experts of {self.top_k_groups} groups of {count // self.num_groups}"
        return None


MoE = Callable[[Tensor, Tensor], Tensor]
"""What experts read [rows, hidden], and what their router reads, to what the chosen ones give together."""


@dataclass(frozen=True, slots=True)
class Experts:
    """MLPs, of which a router chooses some for each token (Shazeer et al., 2017)."""

    router: LinearFunction
    """[T, hidden] to scores [T, experts] float32."""
    gate_up: Sequence[LinearFunction]
    down: Sequence[LinearFunction]
    routing: Routing
    clamped_swiglu: ClampedSwiGLU | None = None
    """None: the gate is SiLU, without limits."""
    activation: Activation | None = None
    """Of MLPs without gates, whose `gate_up` is up alone; None: they have gates."""
    score_correction_bias: Tensor | None = None
    """[experts] float32, for the choice alone."""
    expert_scales: Tensor | None = None
    """[experts] float32: each one's weight is multiplied by it, in the end."""
    has_gelu_gates: bool = False
    """Gates are GELU in its tanh approximation, not SiLU."""
    has_float32_router: bool = False
    """The router takes x in float32."""
    first_expert: int = 0
    """Which expert the first of `gate_up` and `down` is, where other ranks have others."""


def choose_experts(scores: Tensor, routing: Routing, correction: Tensor | None) -> tuple[Tensor, Tensor]:
    """The experts of each token [T, top_k] int64, and their weights, for scores [T, experts]. correction [experts]:
    added to each expert's weight where they are chosen, and nowhere else (DeepSeek-V3, 2024)."""
    if routing.softcap is not None:
        scores = (scores / routing.softcap).tanh() * routing.softcap
    if routing.score_function == "mixer":
        return _route_sparse_mixer(scores, routing)
    weights = sigmoid(scores) if routing.score_function == "sigmoid" else scores.softmax(-1)
    # Scores have the order of the weights, and no equal ones where weights are too near to 0 or 1.
    wanted = scores if correction is None and routing.group_score_top_k == 1 else weights
    wanted = wanted if correction is None else wanted + correction
    chosen = _top_indices(_mask_to_best_groups(wanted, routing), routing.top_k)
    parts = weights.gather(1, chosen)
    if routing.is_normalized:
        parts = parts / (parts.sum(-1, keepdim=True) + routing.normalizer_eps)
    return chosen, parts if routing.scale == 1 else parts * routing.scale


def _top_indices(wanted: Tensor, count: int) -> Tensor:
    """The places [T, count] of the largest of each row, the largest first."""
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
