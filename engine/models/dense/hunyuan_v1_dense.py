"""Hunyuan's dense models (Tencent, 2025): a Llama with norms of queries and keys behind their rotation."""

from quire.engine.checkpoint.files import ModelConfig
from quire.engine.layers.attention import AttentionSpec
from quire.engine.models import llama
from quire.engine.models.spec import DecoderSpec


def spec(config: ModelConfig) -> DecoderSpec:
    return llama.spec(config).having(AttentionSpec, qk_norm="after")
