"""Nemotron-4 and Minitron (Nvidia, 2024): LayerNorms whose weights are offsets from 1, and squared ReLUs."""

from quire.engine.checkpoint.files import ModelConfig
from quire.engine.layers.attention import AttentionSpec
from quire.engine.layers.norm import NormSpec
from quire.engine.models.classic.layer_norm import plain_spec
from quire.engine.models.spec import DecoderSpec


def spec(config: ModelConfig) -> DecoderSpec:
    bias, mlp_bias = (bool(config.raw.get(name)) for name in ("attention_bias", "mlp_bias"))
    base = plain_spec(config, bias=mlp_bias).normed(NormSpec(config.norm_eps, 1.0, centred=True, bias=True))
    return base.having(AttentionSpec, qkv_bias=bias, out_bias=bias)
