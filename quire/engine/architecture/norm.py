"""Norms: RMSNorms (Zhang and Sennrich, 2019) or LayerNorms (Ba et al., 2016)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class NormSpec:
    """Norms of one part."""

    eps: float
    weight_offset: float = 0.0
    """Added to each weight (1 for Gemma's)."""
    is_layer_norm: bool = False
    """They are LayerNorms, not RMSNorms."""
    bias: bool = False
    """Of LayerNorms."""
