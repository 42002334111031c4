"""Qwen3, dense (Yang et al., 2025): RMSNorm on every query and key head, no biases by default."""

from quire.engine.checkpoint.files import ModelConfig
from quire.engine.layers.attention import AttentionSpec
from quire.engine.models.decoder import DecoderSpec, base_spec
from quire.engine.models.qwen2 import layer_windows


def spec(config: ModelConfig) -> DecoderSpec:
    bias = bool(config.raw.get("attention_bias", False))
    attention = {"window": layer_windows(config), "qkv_bias": bias, "out_bias": bias}
    return base_spec(config).having(AttentionSpec, qk_norm=True, **attention)
