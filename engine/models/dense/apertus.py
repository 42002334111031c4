"""Apertus (Swiss AI, 2025): norms of every query and key head, and an MLP without a gate but with xIELU, whose numbers
each layer has learned."""

from quire.engine.checkpoint.files import ModelConfig
from quire.engine.layers.attention import AttentionSpec
from quire.engine.layers.mlp import MlpSpec
from quire.engine.models.spec import DecoderSpec, base_spec


def spec(config: ModelConfig) -> DecoderSpec:
    bias = bool(config.raw.get("attention_bias"))
    base = base_spec(config).having(AttentionSpec, qk_norm="heads", qkv_bias=bias, out_bias=bias)
    return base.having(MlpSpec, gated=False, activation="xielu")
