"""Mistral 7B and its kin (Jiang et al., 2023): a Llama whose every layer may have a sliding window."""

from quire.engine.checkpoint.files import ModelConfig
from quire.engine.layers.attention import AttentionSpec
from quire.engine.models.spec import DecoderSpec, base_spec


def spec(config: ModelConfig) -> DecoderSpec:
    return base_spec(config).having(AttentionSpec, window=config.raw.get("sliding_window", 4096) or None)
