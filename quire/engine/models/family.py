"""A family as a row of a table: how its decoder differs from another family's, or from what all begin with."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from quire.engine.checkpoint.families import layer_windows
from quire.engine.checkpoint.files import ModelConfig
from quire.engine.errors import ModelError
from quire.engine.layers.attention import AttentionSpec
from quire.engine.layers.mlp import MlpSpec
from quire.engine.layers.moe import ExpertsSpec
from quire.engine.layers.norm import NormSpec
from quire.engine.layers.part import SublayerSpec
from quire.engine.models.experts import in_layers
from quire.engine.models.spec import DecoderSpec, base_spec
from quire.engine.models.values import Fields, read_all

SpecAs = Callable[[str, ModelConfig], DecoderSpec]
"""The spec that a family, by its model_type, makes of a config.json, which may be of a family that is like it. Raises
ModelError."""
SpecOf = Callable[[ModelConfig, SpecAs], DecoderSpec]
"""What a family's entry in a table is: a Family, or a function where a row cannot say it. Raises ModelError."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A row. A reader among the values of fields (engine/models/values.py) is asked for each model."""

    like: str = ""
    """The model_type of the family that it is like; "": it begins with base_spec."""
    refused: Mapping[str, str] = field(default_factory=dict)
    """Fields of config.json that must not be set, with what the error says behind their names."""
    norm: Callable[[ModelConfig], NormSpec] | None = None
    """Of all norms; None: they stay."""
    attention: Fields = field(default_factory=dict)
    mlp: Fields = field(default_factory=dict)
    mixing: Callable[[ModelConfig, NormSpec], Sequence[SublayerSpec | None]] | None = None
    """By layer what stands in attention's place, given the model's norm; None: attention stays."""
    experts: Callable[[ModelConfig, NormSpec], ExpertsSpec | None] | None = None
    """What stands in the MLP's place in layers with experts; None: the model has none."""
    decoder: Fields = field(default_factory=dict)

    def __call__(self, config: ModelConfig, spec_as: SpecAs) -> DecoderSpec:
        """Raises ModelError."""
        for name, wrong in self.refused.items():
            if config.raw.get(name):
                raise ModelError(f"model: config.json: {name} {wrong}")
        spec = spec_as(self.like, config) if self.like else base_spec(config)
        if self.norm is not None:
            spec = spec.normed(self.norm(config))
        spec = spec.having(AttentionSpec, **read_all(self.attention, config))
        spec = spec.having(MlpSpec, **read_all(self.mlp, config))
        if self.mixing is not None:
            spec = spec.mixing(self.mixing(config, spec.norm))
        if self.experts is not None and (experts := self.experts(config, spec.norm)) is not None:
            spec = in_layers(experts, spec, config)
        return replace(spec, **read_all(self.decoder, config))


def windows(config: ModelConfig) -> tuple[int | None, ...]:
    """By layer, as AttentionSpec.window."""
    return layer_windows(config.raw, config.num_layers)


def ropes_in_windows(config: ModelConfig) -> list[dict[str, Any] | None]:
    """By layer: those without a window leave positions out."""
    return [None if window is None else config.rope for window in windows(config)]
