"""GLM-4 as transformers has it (GLM Team, 2024): rotations of neighbours in half of each head, biases of queries, keys
and values."""

from quire.engine.checkpoint.files import ModelConfig
from quire.engine.layers.attention import AttentionSpec
from quire.engine.models.spec import DecoderSpec, base_spec


def spec(config: ModelConfig) -> DecoderSpec:
    return base_spec(config).having(AttentionSpec, qkv_bias=bool(config.raw.get("attention_bias")))
