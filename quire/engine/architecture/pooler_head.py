"""Linears after pooling: dense modules of embedding models, and classifier heads."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HeadLayerSpec:
    name: str
    """Tensor name without .weight or .bias."""
    in_features: int
    out_features: int
    bias: bool = True
    activation: str = "identity"
    norm: str | None = None
    """Name of a LayerNorm after the activation."""
    norm_bias: bool = False
    eps: float = 0.0
