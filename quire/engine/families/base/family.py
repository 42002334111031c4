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
    model_types: tuple[str, ...]
    field_names: Mapping[str, str] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Values for null or missing fields, by Llama's names."""
    missing_defaults: Mapping[str, Any] = field(default_factory=dict)
    """For fields whose null has another meaning."""
    fill_derived_fields: Callable[[dict[str, Any]], None] | None = None
    """Runs before validation, so fields may have values of any type."""
    multimodal_text_defaults: Mapping[str, Any] = field(default_factory=dict)
    """Sizes that text_config may omit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderFamily(ModelFamily):
    other_layer_types: tuple[str, ...] = ()
    has_partial_rotary: bool = False
    """True if transformers' class reads partial_rotary_factor."""
    has_longrope: bool = False
    unsupported_fields: Mapping[str, str] = field(default_factory=dict)
    """Fields that must not be set, mapped to the end of the error message."""
    check_config: Callable[[ModelConfig], None] | None = None
    """Raises ModelError."""

    base: DecoderFamily | None = None
    """The fields below change this family's decoder. None means base_decoder_spec's decoder."""
    build_base_spec: Callable[[ModelConfig], DecoderSpec] | None = None
    """Replaces `base`'s decoder. Raises ModelError."""
    norm: Callable[[ModelConfig], NormSpec] | None = None
    """None keeps the base's norm."""
    attention: SpecFields = field(default_factory=dict)
    mlp: SpecFields = field(default_factory=dict)
    """A model is refused if its config.json names another activation (checkpoint/family_spec.py)."""
    mixers: Callable[[ModelConfig, NormSpec], Sequence[SublayerSpec | None]] | None = None
    """Replaces attention in each layer; None keeps it."""
    experts: Callable[[ModelConfig, NormSpec], MoELayerSpec | None] | None = None
    """Returns None for a model without experts."""
    decoder: SpecFields = field(default_factory=dict)

    weight_names: WeightNames = field(default_factory=WeightNames)
    gguf: GGUFFormat | None = None

    def derive(self, *model_types: str, **changes: Any) -> DecoderFamily:
        """Config fields and weight names in `changes` replace this family's. Spec changes and checks add to this
        family's. GGUF and multimodal_text_defaults are not inherited.
        """
        return replace(self, model_types=model_types, base=self, **_NO_DECODER_CHANGES | changes)

    @property
    def has_experts(self) -> bool:
        return self.experts is not None or (self.base is not None and self.base.has_experts)

    @property
    def layer_types(self) -> tuple[str, ...]:
        return (*_FULL_ATTENTION_TYPES, *self.other_layer_types)

    def decoder_spec(self, config: ModelConfig) -> DecoderSpec:
        """Accepts configs of derived families. Raises ModelError."""
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
