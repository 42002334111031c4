"""A family as a row of a table: how its decoder differs from another family's, or from what all begin with."""

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
from quire.engine.checkpoint.families import layer_windows
from quire.engine.checkpoint.files import ModelConfig
from quire.engine.errors import ModelError
from quire.engine.families.config_fields import SpecFields, read_fields
from quire.engine.families.moe_fields import with_moe_layers
from quire.engine.families.spec import base_decoder_spec

FamilySpecBuilder = Callable[[str, ModelConfig], DecoderSpec]
"""The spec that a family, by its model_type, makes of a config.json, which may be of a family that is like it. Raises
ModelError."""
FamilyEntry = Callable[[ModelConfig, FamilySpecBuilder], DecoderSpec]
"""What a family's entry in a table is: a Family, or a function where a row cannot say it. Raises ModelError."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A row. A reader among the values of fields (engine/families/config_fields.py) is asked for each model."""

    base: str = ""
    """The model_type of the family that it is like; "": it begins with base_decoder_spec."""
    unsupported_fields: Mapping[str, str] = field(default_factory=dict)
    """Fields of config.json that must not be set, with what the error says behind their names."""
    norm: Callable[[ModelConfig], NormSpec] | None = None
    """Of all norms; None: they stay."""
    attention: SpecFields = field(default_factory=dict)
    mlp: SpecFields = field(default_factory=dict)
    mixers: Callable[[ModelConfig, NormSpec], Sequence[SublayerSpec | None]] | None = None
    """By layer what stands in attention's place, given the model's norm; None: attention stays."""
    experts: Callable[[ModelConfig, NormSpec], MoELayerSpec | None] | None = None
    """What stands in the MLP's place in layers with experts; None: the model has none."""
    decoder: SpecFields = field(default_factory=dict)

    def __call__(self, config: ModelConfig, build_spec: FamilySpecBuilder) -> DecoderSpec:
        """Raises ModelError."""
        for name, problem in self.unsupported_fields.items():
            if config.raw.get(name):
                raise ModelError(f"model: config.json: {name} {problem}")
        spec = build_spec(self.base, config) if self.base else base_decoder_spec(config)
        if self.norm is not None:
            spec = spec.with_norm(self.norm(config))
        spec = spec.replace_sublayer_fields(AttentionLayerSpec, **read_fields(self.attention, config))
        spec = spec.replace_sublayer_fields(MLPSpec, **read_fields(self.mlp, config))
        if self.mixers is not None:
            spec = spec.with_mixers(self.mixers(config, spec.norm))
        if self.experts is not None and (experts := self.experts(config, spec.norm)) is not None:
            spec = with_moe_layers(experts, spec, config)
        return replace(spec, **read_fields(self.decoder, config))


def sliding_windows(config: ModelConfig) -> tuple[int | None, ...]:
    """By layer, as AttentionLayerSpec.window."""
    return layer_windows(config.raw, config.num_layers)


def window_only_ropes(config: ModelConfig) -> list[dict[str, Any] | None]:
    """By layer: those without a window leave positions out."""
    return [None if window is None else config.rope for window in sliding_windows(config)]
