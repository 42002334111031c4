"""Ministral 3 and its kin (Mistral AI, 2025): a Mistral with YaRN, whose queries grow with their position."""

from quire.engine.checkpoint.files import ModelConfig
from quire.engine.layers.attention import AttentionSpec
from quire.engine.models.spec import DecoderSpec, base_spec


def spec(config: ModelConfig) -> DecoderSpec:
    return base_spec(config).having(AttentionSpec, window=config.raw.get("sliding_window") or None)
