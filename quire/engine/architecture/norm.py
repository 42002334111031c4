"""RMSNorm (Zhang and Sennrich, 2019) or LayerNorm (Ba et al., 2016)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class NormSpec:
    eps: float
    weight_offset: float = 0.0
    """This is added to each weight (1 for Gemma)."""
    is_layer_norm: bool = False
    bias: bool = False
