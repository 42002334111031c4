"""Activations whose bits do not depend on an element's position in x. On CPUs, PyTorch computes the elements after the
last whole SIMD vector differently, except in exp, erf and tanh (PyTorch 2.13).
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.kernels.parameters.activation import Activation


def sigmoid(x: Tensor) -> Tensor:
    if x.device.type != "cpu":
        return torch.sigmoid(x)
    return torch.exp(-_to_at_least_float32(x)).add_(1).reciprocal_().to(x.dtype)


def silu(x: Tensor) -> Tensor:
    if x.device.type != "cpu":
        return F.silu(x)
    wide = _to_at_least_float32(x)
    return (wide / torch.exp(-wide).add_(1)).to(x.dtype)


def gelu(x: Tensor) -> Tensor:
    if x.device.type != "cpu":
        return F.gelu(x)
    wide = _to_at_least_float32(x)
    return torch.erf(wide * math.sqrt(0.5)).add_(1).mul_(0.5).mul_(wide).to(x.dtype)


def gelu_tanh(x: Tensor) -> Tensor:
    if x.device.type != "cpu":
        return F.gelu(x, approximate="tanh")
    wide = _to_at_least_float32(x)
    inner = (wide * wide).mul_(0.044715).add_(1).mul_(wide).mul_(math.sqrt(2 / math.pi))
    return inner.tanh_().add_(1).mul_(0.5).mul_(wide).to(x.dtype)


def _to_at_least_float32(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def apply_activation(x: Tensor, activation: Activation) -> Tensor:
    match activation.kind:
        case "gelu":
            return gelu(x)
        case "gelu_tanh":
            return gelu_tanh(x)
        case "relu":
            return F.relu(x)
        case "relu2":
            return F.relu(x).square()
        case "times":
            return x * activation.slope
        case "xielu":
            wide = _to_at_least_float32(x)
            above, below = wide.clamp(min=0), wide.clamp(max=0)
            curved = activation.positive_alpha * above.square() + activation.negative_alpha * (
                torch.expm1(below) - below
            )
            return (curved + activation.slope * wide).to(x.dtype)
