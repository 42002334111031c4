"""Activation functions and what they are given."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

ACTIVATION_KINDS = ("gelu", "gelu_tanh", "relu", "relu2", "xielu", "times")
"""By the numbers that kernels/cpu/norm.cpp gives them."""


@dataclass(frozen=True, slots=True)
class Activation:
    kind: Literal["gelu", "gelu_tanh", "relu", "relu2", "xielu", "times"]
    """GELU (Hendrycks and Gimpel, 2016), as it is and in its tanh approximation; ReLU and its square (So et al., 2021);
    xIELU (Huang and Schlag, 2024); a factor."""
    positive_alpha: float = 0.0
    """Of xIELU, which is a x^2 + b x above 0: a."""
    negative_alpha: float = 0.0
    """Below, where it is c (e^x - 1 - x) + b x: c."""
    slope: float = 0.0
    """b; or the factor."""


GELU = Activation("gelu")


@dataclass(frozen=True, slots=True)
class ClampedSwiGLU:
    """A gated product with limits (gpt-oss, 2025): g * sigmoid(alpha * g) * (u + 1), where g, the gate, is at most
    `limit`, and u, what it is multiplied with, is from -limit to limit."""

    alpha: float
    limit: float
