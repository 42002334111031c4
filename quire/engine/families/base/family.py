"""A family: all that Quire knows of the models of one architecture, each in a file of engine/families."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from quire.engine.architecture.attention import AttentionLayerSpec
from quire.engine.architecture.decoder import DecoderSpec
from quire.engine.architecture.mlp import MLPSpec
from quire.engine.architecture.moe import MoELayerSpec
from quire.engine.architecture.norm import NormSpec
from quire.engine.architecture.sublayer import SublayerSpec
from quire.engine.common.errors import ModelError
from quire.engine.families.base.base_spec import base_decoder_spec
from quire.engine.families.base.config_fields import SpecFields, read_fields
from quire.engine.families.base.gguf.gguf_format import GGUFFormat
from quire.engine.families.base.model_config import ModelConfig
from quire.engine.families.base.moe_fields import with_moe_layers
from quire.engine.families.base.weight_names import WeightNames

_FULL_ATTENTION_TYPES = ("full_attention", "sliding_attention")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFamily:
    """What config.json says of the models of a family, as it differs from Llama's."""

    model_types: tuple[str, ...]
    """What config.json calls them, in model_type."""
    field_names: Mapping[str, str] = field(default_factory=dict)
    """Fields that are called otherwise than Llama's, to Llama's names."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """By Llama's names, what config.json means where a field is null or missing."""
    missing_defaults: Mapping[str, Any] = field(default_factory=dict)
    """The same of fields where null means something else than to leave them out."""
    fill_derived_fields: Callable[[dict[str, Any]], None] | None = None
    """Puts into the content of config.json, by Llama's names and with the defaults, what follows from other fields.
    Nothing is checked yet: a value may be of any type."""
    multimodal_text_defaults: Mapping[str, Any] = field(default_factory=dict)
    """Sizes that text_config leaves out, in models that take images too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderFamily(ModelFamily):
    """A family of decoders. What is left out is as Llama has it. A reader among the values of spec fields
    (config_fields.py) is called with each model's config."""

    other_layer_types: tuple[str, ...] = ()
    """What layer_types may name beside full and sliding attention."""
    has_partial_rotary: bool = False
    """partial_rotary_factor counts; transformers' other classes do not read it."""
    has_longrope: bool = False
    """LongRoPE is computed; of other families it is refused."""
    unsupported_fields: Mapping[str, str] = field(default_factory=dict)
    """Fields that must not be set, with what the error says behind their names."""
    check_config: Callable[[ModelConfig], None] | None = None
    """Raises ModelError for a model that is not served."""

    # The decoder
    base: DecoderFamily | None = None
    """The family whose decoder this one's begins with; None: it begins with Llama's without biases
    (base_decoder_spec). What follows below is applied on top of it."""
    build_base_spec: Callable[[ModelConfig], DecoderSpec] | None = None
    """Makes the decoder that this one's begins with, in the place of `base`'s; raises ModelError."""
    norm: Callable[[ModelConfig], NormSpec] | None = None
    """Reads the spec of all norms of hidden states, queries and keys; None: the base's. Norms within recurrent
    sublayers follow from their own spec, and multiply by the stored weight."""
    attention: SpecFields = field(default_factory=dict)
    """Fields of AttentionLayerSpec that differ from the base's."""
    mlp: SpecFields = field(default_factory=dict)
    """Fields of MLPSpec that differ from the base's."""
    mixers: Callable[[ModelConfig, NormSpec], Sequence[SublayerSpec | None]] | None = None
    """By layer, what stands in attention's place; None there: attention stays."""
    experts: Callable[[ModelConfig, NormSpec], MoELayerSpec | None] | None = None
    """Reads what stands in the MLP's place in layers with experts; None: the model has none."""
    decoder: SpecFields = field(default_factory=dict)
    """Fields of DecoderSpec that differ from the base's."""

    # The checkpoint
    weight_names: WeightNames = field(default_factory=WeightNames)
    gguf: GGUFFormat | None = None
    """None: its GGUF files are not served."""

    def derive(self, *model_types: str, **changes: Any) -> DecoderFamily:
        """A family like this one but for `changes`. Fields of config.json and names of weights in `changes` replace
        this family's; what they say of the decoder is applied on top of this family's decoder, whose checks are made
        too. GGUF files and multimodal_text_defaults are not inherited."""
        return replace(self, model_types=model_types, base=self, **_NO_DECODER_CHANGES | changes)

    @property
    def has_experts(self) -> bool:
        """Whether `experts` says how mixtures of experts are, here or in the base. Not so where build_base_spec makes
        them."""
        return self.experts is not None or (self.base is not None and self.base.has_experts)

    @property
    def layer_types(self) -> tuple[str, ...]:
        """What layer_types may name."""
        return (*_FULL_ATTENTION_TYPES, *self.other_layer_types)

    def decoder_spec(self, config: ModelConfig) -> DecoderSpec:
        """Of a config.json of this family, or of one that is derived from it. Raises ModelError."""
        for name, problem in self.unsupported_fields.items():
            if config.raw.get(name):
                raise ModelError(f"model: config.json: {name} {problem}")
        if self.check_config is not None:
            self.check_config(config)
        spec = self._base_spec(config)
        if self.norm is not None:
            spec = spec.with_norm(self.norm(config))
        spec = spec.replace_sublayer_fields(AttentionLayerSpec, **read_fields(self.attention, config))
        spec = spec.replace_sublayer_fields(MLPSpec, **read_fields(self.mlp, config))
        if self.mixers is not None:
            spec = spec.with_mixers(self.mixers(config, spec.norm))
        if self.experts is not None and (experts := self.experts(config, spec.norm)) is not None:
            spec = with_moe_layers(experts, spec, config)
        return replace(spec, **read_fields(self.decoder, config))

    def _base_spec(self, config: ModelConfig) -> DecoderSpec:
        if self.build_base_spec is not None:
            return self.build_base_spec(config)
        return base_decoder_spec(config) if self.base is None else self.base.decoder_spec(config)


_NO_DECODER_CHANGES: dict[str, Any] = {
    "unsupported_fields": {},
    "check_config": None,
    "build_base_spec": None,
    "norm": None,
    "attention": {},
    "mlp": {},
    "mixers": None,
    "experts": None,
    "decoder": {},
    "gguf": None,
    "multimodal_text_defaults": {},
}
