"""What layers do to the residual stream beside attention and MLPs."""

from __future__ import annotations

from dataclasses import dataclass

from quire.engine.architecture.norm import NormSpec
from quire.engine.architecture.sublayer import SublayerSpec


@dataclass(frozen=True, slots=True)
class OutputNormSpec(SublayerSpec):
    """Norm of what the parts before give, before it joins the residual stream."""

    norm: NormSpec
    norm_name: str
    """In a checkpoint, behind the layer's."""


@dataclass(frozen=True, slots=True)
class LayerScalarSpec(SublayerSpec):
    """The residual stream, and what is to be added to it, times a learned number."""

    scalar_name: str
    """In a checkpoint, behind the layer's."""


@dataclass(frozen=True, slots=True)
class PerLayerInputsSpec:
    """What tokens have for all layers."""

    vocab_size: int
    size_per_layer: int
    """Numbers of a token for each layer."""
    num_layers: int
    norm: NormSpec
    image_token_id: int
    """Whose numbers the tokens have that stand for a part of an image."""


@dataclass(frozen=True, slots=True)
class PerLayerInputGateSpec(SublayerSpec):
    """What lets a layer's own of these numbers into the stream."""

    size_per_layer: int
    layer_index: int
    norm: NormSpec
