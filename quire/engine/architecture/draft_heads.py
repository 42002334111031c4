from __future__ import annotations

from dataclasses import dataclass

from quire.engine.architecture.decoder import DecoderSpec, LayerSpec
from quire.engine.architecture.norm import NormSpec
from quire.engine.architecture.parameter_shapes import ParameterShapes, linear_shapes, norm_shapes

MTP_LAYER = "model.layers.0"
EMBEDDING_NORM, HIDDEN_NORM, EH_PROJ, OUTPUT_NORM = (
    f"{MTP_LAYER}.{name}" for name in ("enorm", "hnorm", "eh_proj", "shared_head.norm")
)
"""Only MTP layers have these."""
EAGLE_FC, EAGLE3_HEAD = "fc", "lm_head"
EAGLE3_NORMS = ("layers.0.input_layernorm", "layers.0.hidden_norm", "norm")


@dataclass(frozen=True, slots=True)
class MTPSpec:
    layers: tuple[LayerSpec, ...]
    hidden_size: int
    norm: NormSpec

    @classmethod
    def from_decoder(cls, spec: DecoderSpec) -> MTPSpec:
        return cls(spec.layers, spec.hidden_size, spec.norm)

    @property
    def layers_by_name(self) -> dict[str, LayerSpec]:
        return {f"model.layers.{index}": layer for index, layer in enumerate(self.layers)}

    def outer_shapes(self) -> ParameterShapes:
        size = self.hidden_size
        norms = dict.fromkeys((EMBEDDING_NORM, HIDDEN_NORM, OUTPUT_NORM), size)
        return linear_shapes([EH_PROJ], size, 2 * size) | norm_shapes(norms, self.norm)

    def parameter_shapes(self) -> ParameterShapes:
        return self.outer_shapes() | _layer_shapes(self.layers_by_name, self.hidden_size)


@dataclass(frozen=True, slots=True)
class EagleSpec:
    layers: tuple[LayerSpec, ...]
    """The first layer has no input norm."""
    hidden_size: int
    norm: NormSpec
    fc_bias: bool
    aux_layers: tuple[int, ...] = ()
    """Decoder layers whose inputs EAGLE-3 reads."""
    norm_before_residual: bool = False
    """Only EAGLE-3 sets this."""
    draft_vocab_size: int | None = None
    """Size of EAGLE-3's draft vocabulary. If None, the decoder's head is used."""
    has_token_map: bool = False
    """A table maps the draft head's token ids to the decoder's."""

    @property
    def layers_by_name(self) -> dict[str, LayerSpec]:
        return {f"layers.{index}": layer for index, layer in enumerate(self.layers)}

    def outer_shapes(self) -> ParameterShapes:
        size = self.hidden_size
        shapes = linear_shapes([EAGLE_FC], size, (len(self.aux_layers) or 2) * size, bias=self.fc_bias)
        if self.draft_vocab_size is None:
            return shapes
        shapes |= norm_shapes(dict.fromkeys(EAGLE3_NORMS, size), self.norm)
        return shapes | linear_shapes([EAGLE3_HEAD], self.draft_vocab_size, size)

    def parameter_shapes(self) -> ParameterShapes:
        return self.outer_shapes() | _layer_shapes(self.layers_by_name, self.hidden_size)


@dataclass(frozen=True, slots=True)
class MedusaSpec:
    num_heads: int
    num_blocks: int
    """Linears of a head before its last one."""
    hidden_size: int
    vocab_size: int

    def block_names(self, head: int) -> list[str]:
        return [f"{head}.{block}.linear" for block in range(self.num_blocks)]

    def last_name(self, head: int) -> str:
        return f"{head}.{self.num_blocks}"

    def parameter_shapes(self) -> ParameterShapes:
        shapes = ParameterShapes()
        for head in range(self.num_heads):
            shapes |= linear_shapes(self.block_names(head), self.hidden_size, self.hidden_size, bias=True)
            shapes |= linear_shapes([self.last_name(head)], self.vocab_size, self.hidden_size)
        return shapes


def _layer_shapes(layers: dict[str, LayerSpec], hidden_size: int) -> ParameterShapes:
    shapes = ParameterShapes()
    for name, layer in layers.items():
        for sublayer in layer:
            shapes |= sublayer.parameter_shapes(name, hidden_size)
    return shapes
