"""What an MLP without a gate does to each number between its two matrices; and a factor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

KINDS = ("gelu", "gelu_tanh", "relu", "relu2", "xielu", "times")
"""By the numbers that kernels/cpu/norm.cpp gives them."""


@dataclass(frozen=True, slots=True)
class Activation:
    kind: Literal["gelu", "gelu_tanh", "relu", "relu2", "xielu", "times"]
    """GELU (Hendrycks and Gimpel, 2016), as it is and in its tanh approximation; ReLU and its square (So et al., 2021);
    xIELU (Huang and Schlag, 2024); a factor."""
    positive: float = 0.0
    """Of xIELU, which is a x^2 + b x above 0: a."""
    negative: float = 0.0
    """Below, where it is c (e^x - 1 - x) + b x: c."""
    slope: float = 0.0
    """b; or the factor."""


GELU = Activation("gelu")

_VECTOR = 64
"""PyTorch computes the numbers beyond the last whole vector by other instructions. Rows that end where a vector does
are computed alike, whatever rows are beside them."""


def activate(x: Tensor, activation: Activation) -> Tensor:
    """Of each number in x ([..., width])."""
    if lacking := -x.shape[-1] % _VECTOR:
        return activate(F.pad(x, (0, lacking)), activation)[..., : x.shape[-1]].contiguous()
    match activation.kind:
        case "gelu":
            return F.gelu(x)
        case "gelu_tanh":
            return F.gelu(x, approximate="tanh")
        case "relu":
            return F.relu(x)
        case "relu2":
            return F.relu(x).square()
        case "times":
            return x * activation.slope
        case "xielu":
            wide = x if x.dtype == torch.float64 else x.float()
            above, below = wide.clamp(min=0), wide.clamp(max=0)
            curved = activation.positive * above.square() + activation.negative * (torch.expm1(below) - below)
            return (curved + activation.slope * wide).to(x.dtype)


@dataclass(frozen=True, slots=True)
class Clamp:
    """A gated product with limits (gpt-oss, 2025): g * sigmoid(alpha * g) * (u + 1), where g, the gate, is at most
    `limit`, and u, what it is multiplied with, is from -limit to limit."""

    alpha: float
    limit: float
