"""Linears after pooling: embedding models' dense modules, and classifier heads."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HeadLayerSpec:
    name: str
    in_features: int
    out_features: int
    bias: bool = True
    activation: str = "identity"
    norm: str | None = None
    norm_bias: bool = False
    eps: float = 0.0
