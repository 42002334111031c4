"""The spec of linears after a pooling: dense modules of embedding models, and heads of classifiers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HeadLayerSpec:
    """One linear of a head, with what follows it."""

    name: str
    """Of its tensors in the checkpoint, without .weight and .bias."""
    in_features: int
    out_features: int
    bias: bool = True
    activation: str = "identity"
    norm: str | None = None
    """The name of a LayerNorm behind the activation."""
    norm_bias: bool = False
    eps: float = 0.0
