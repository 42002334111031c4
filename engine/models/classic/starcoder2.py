"""StarCoder2 (Lozhkov et al., 2024): biases everywhere, and a sliding window in every layer."""

from quire.engine.checkpoint.files import ModelConfig
from quire.engine.layers.attention import AttentionSpec
from quire.engine.models.classic.layer_norm import plain_spec
from quire.engine.models.spec import DecoderSpec


def spec(config: ModelConfig) -> DecoderSpec:
    base = plain_spec(config, bias=bool(config.raw.get("use_bias")))
    return base.having(AttentionSpec, window=config.raw.get("sliding_window") or None)
