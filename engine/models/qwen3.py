"""Qwen3, dense (Yang et al., 2025): RMSNorm on every query and key head, no biases by default."""

from quire.engine.checkpoint.files import ModelConfig
from quire.engine.layers.attention import AttentionSpec
from quire.engine.models import qwen2
from quire.engine.models.spec import DecoderSpec


def spec(config: ModelConfig) -> DecoderSpec:
    bias = bool(config.raw.get("attention_bias", False))
    return qwen2.spec(config).having(AttentionSpec, qk_norm="heads", qkv_bias=bias, out_bias=bias)
