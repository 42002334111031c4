"""Helium 1 (Kyutai, 2025): a Llama with rotations of neighbours."""

from quire.engine.checkpoint.files import ModelConfig
from quire.engine.layers.attention import AttentionSpec
from quire.engine.models import llama
from quire.engine.models.spec import DecoderSpec


def spec(config: ModelConfig) -> DecoderSpec:
    return llama.spec(config).having(AttentionSpec, out_bias=False)
