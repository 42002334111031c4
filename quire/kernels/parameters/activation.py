from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

ACTIVATION_KINDS = ("gelu", "gelu_tanh", "relu", "relu2", "xielu", "times")
"""Numbered as in kernels/cpu/norm.cpp."""


@dataclass(frozen=True, slots=True)
class Activation:
    kind: Literal["gelu", "gelu_tanh", "relu", "relu2", "xielu", "times"]
    """GELU (Hendrycks and Gimpel, 2016), exact or tanh-approximated; ReLU and its square (So et al., 2021); xIELU
    (Huang and Schlag, 2024); or "times", which multiplies by `slope`.
    """
    positive_alpha: float = 0.0
    """a of xIELU's a x^2 + b x for x above 0."""
    negative_alpha: float = 0.0
    """c of xIELU's c (e^x - 1 - x) + b x for x below 0."""
    slope: float = 0.0
    """b of xIELU, or the factor of "times"."""


GELU = Activation("gelu")


@dataclass(frozen=True, slots=True)
class ClampedSwiGLU:
    """The gate of gpt-oss (2025): g * sigmoid(alpha * g) * (u + 1), with gate g at most `limit` and u in [-limit,
    limit].
    """

    alpha: float
    limit: float
