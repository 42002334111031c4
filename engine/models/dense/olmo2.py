"""OLMo 2 (OLMo Team, 2024): norms behind attention and the MLP instead of before, and of whole queries and keys."""

from quire.engine.checkpoint.files import ModelConfig
from quire.engine.layers.attention import AttentionSpec
from quire.engine.layers.mlp import MlpSpec
from quire.engine.models.spec import DecoderSpec, base_spec


def spec(config: ModelConfig) -> DecoderSpec:
    bias = bool(config.raw.get("attention_bias"))
    behind = {"input_norm": False, "output_norm": True}
    base = base_spec(config).having(AttentionSpec, qk_norm="whole", qkv_bias=bias, out_bias=bias, **behind)
    return base.having(MlpSpec, **behind)
