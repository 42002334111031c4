"""How a router chooses experts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

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
