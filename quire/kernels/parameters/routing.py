from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

COMPILED_SCORE_FUNCTIONS = ("softmax", "sigmoid", "mixer")
"""Score functions with a C++ kernel, numbered as in kernels/cpu/decoder/routing.h."""


@dataclass(frozen=True, slots=True)
class Routing:
    """Of experts with equal scores, the one with the lowest index is chosen first."""

    top_k: int
    score_function: Literal["softmax", "sigmoid", "mixer"] = "softmax"
    """softmax: over all experts. sigmoid: of each score. mixer: for each choice, softmax over experts not yet chosen
    whose scores are not much smaller (SparseMixer: Liu et al., 2024).
    """
    is_normalized: bool = True
    """Divide the chosen weights by their sum. This has no effect on SparseMixer."""
    normalizer_eps: float = 0.0
    """Added to the sum that divides the chosen weights."""
    scale: float = 1.0
    """Factor of the final weights."""
    num_groups: int = 1
    """Groups of consecutive experts, equal in size."""
    top_k_groups: int = 1
    """First this many groups are chosen, then experts from these groups (DeepSeek-V2, 2024)."""
    group_score_top_k: Literal[1, 2] = 1
    """A group's score is the sum of the scores of this many best experts in it."""
    softcap: float | None = None
    """With a softcap c, a score s becomes c * tanh(s / c)."""
    weights_inputs: bool = False
    """If True, weights multiply an expert's input instead of its output (Llama 4, 2025)."""
    jitter: float = 0.0
    """SparseMixer keeps scores s for which (max - s) / max(|s|, max) is at most twice this."""

    def invalid_reason(self, count: int) -> str | None:
        if self.top_k > count:
            return f"{self.top_k} of {count} experts"
        if count % self.num_groups:
            return f"{count} experts in {self.num_groups} groups"
        if self.top_k_groups > self.num_groups or self.group_score_top_k > count // self.num_groups:
            return f"{self.top_k_groups} of {self.num_groups} groups by their {self.group_score_top_k} best experts"
        if self.top_k > self.top_k_groups * (count // self.num_groups):
            return f"{self.top_k} experts of {self.top_k_groups} groups of {count // self.num_groups}"
        return None
