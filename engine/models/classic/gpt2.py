"""GPT-2 (Radford et al., 2019), and StarCoder and SantaCoder (Li et al., 2023), which have one key and value for all
heads: learned positions, LayerNorms, MLPs without gates, biases everywhere."""

from dataclasses import replace

from quire.engine.checkpoint.files import ModelConfig
from quire.engine.errors import ModelError
from quire.engine.layers.attention import AttentionSpec
from quire.engine.models.classic.layer_norm import plain_spec
from quire.engine.models.spec import DecoderSpec


def spec(config: ModelConfig) -> DecoderSpec:
    raw = config.raw
    if raw.get("add_cross_attention"):
        raise ModelError("model: config.json: add_cross_attention is not supported: it makes a part of another model")
    scale = 1.0 if raw.get("scale_attn_weights") is False else config.head_dim**-0.5
    by_layer = raw.get("scale_attn_by_inverse_layer_idx")
    scales = [scale / (layer + 1 if by_layer else 1) for layer in range(config.num_layers)]
    base = plain_spec(config, bias=True).having(AttentionSpec, rope=None, scale=scales)
    return replace(base, positions=config.max_position)
