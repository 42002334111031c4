from __future__ import annotations

from dataclasses import dataclass

from quire.engine.architecture.norm import NormSpec
from quire.engine.architecture.parameter_shapes import ParameterShapes, linear_shapes, norm_shapes
from quire.engine.architecture.sublayer import SublayerSpec

EMBED_TOKENS_PER_LAYER, PER_LAYER_MODEL_PROJECTION = "model.embed_tokens_per_layer", "model.per_layer_model_projection"
PER_LAYER_PROJECTION_NORM = "model.per_layer_projection_norm"


@dataclass(frozen=True, slots=True)
class OutputNormSpec(SublayerSpec):
    norm: NormSpec
    norm_name: str

    def parameter_shapes(self, layer: str, hidden_size: int) -> ParameterShapes:
        return norm_shapes({f"{layer}.{self.norm_name}": hidden_size}, self.norm)


@dataclass(frozen=True, slots=True)
class LayerScalarSpec(SublayerSpec):
    """A learned number multiplies the residual stream and the sublayer output not yet added to it."""

    scalar_name: str

    def parameter_shapes(self, layer: str, hidden_size: int) -> ParameterShapes:
        return {f"{layer}.{self.scalar_name}": (1,)}


@dataclass(frozen=True, slots=True)
class PerLayerInputsSpec:
    vocab_size: int
    size_per_layer: int
    """Elements per token and layer."""
    num_layers: int
    norm: NormSpec
    image_token_id: int
    """Image tokens use this token's per-layer embeddings."""

    @property
    def total_size(self) -> int:
        return self.size_per_layer * self.num_layers

    def parameter_shapes(self, hidden_size: int) -> ParameterShapes:
        shapes: ParameterShapes = {f"{EMBED_TOKENS_PER_LAYER}.weight": (self.vocab_size, self.total_size)}
        shapes |= linear_shapes([PER_LAYER_MODEL_PROJECTION], self.total_size, hidden_size)
        return shapes | norm_shapes({PER_LAYER_PROJECTION_NORM: self.size_per_layer}, self.norm)


@dataclass(frozen=True, slots=True)
class PerLayerInputGateSpec(SublayerSpec):
    size_per_layer: int
    layer_index: int
    norm: NormSpec

    def parameter_shapes(self, layer: str, hidden_size: int) -> ParameterShapes:
        shapes = linear_shapes([f"{layer}.per_layer_input_gate"], self.size_per_layer, hidden_size)
        shapes |= linear_shapes([f"{layer}.per_layer_projection"], hidden_size, self.size_per_layer)
        return shapes | norm_shapes({f"{layer}.post_per_layer_input_norm": hidden_size}, self.norm)
