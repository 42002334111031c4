"""Qwen2 and Qwen2.5 (Yang et al., 2024): biases on query, key and value; some models slide a window in upper layers."""

from quire.engine.checkpoint.families import layer_windows
from quire.engine.checkpoint.files import ModelConfig
from quire.engine.layers.attention import AttentionSpec
from quire.engine.models.spec import DecoderSpec, base_spec


def spec(config: ModelConfig) -> DecoderSpec:
    return base_spec(config).having(AttentionSpec, window=layer_windows(config.raw, config.num_layers), qkv_bias=True)
