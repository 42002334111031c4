"""Seed-OSS (ByteDance Seed, 2025): a Llama with biases of queries, keys and values."""

from quire.engine.checkpoint.files import ModelConfig
from quire.engine.layers.attention import AttentionSpec
from quire.engine.models import llama
from quire.engine.models.spec import DecoderSpec


def spec(config: ModelConfig) -> DecoderSpec:
    return llama.spec(config).having(AttentionSpec, out_bias=bool(config.raw.get("attention_out_bias")))
