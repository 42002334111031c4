"""Qwen3.5's text models (Qwen Team, 2026): gated delta nets in most layers, attention with gates in the others; norms
whose weights are offsets from 1."""

from quire.engine.checkpoint.files import ModelConfig
from quire.engine.errors import ModelError
from quire.engine.layers.attention import AttentionSpec
from quire.engine.layers.norm import NormSpec
from quire.engine.layers.recurrent.delta_net import DeltaNetSpec
from quire.engine.models.spec import DecoderSpec, base_spec


def spec(config: ModelConfig) -> DecoderSpec:
    raw, norm, bias = config.raw, NormSpec(config.norm_eps, 1.0), bool(config.raw.get("attention_bias"))
    base = base_spec(config, norm_offset=1.0)
    base = base.having(AttentionSpec, qk_norm="heads", gated=True, qkv_bias=bias, out_bias=bias)
    key_heads, heads = raw.get("linear_num_key_heads") or 16, raw.get("linear_num_value_heads") or 32
    key, value = raw.get("linear_key_head_dim") or 128, raw.get("linear_value_head_dim") or 128
    if heads % key_heads:
        raise ModelError(f"model: config.json: linear_num_key_heads: {key_heads} do not divide {heads} value heads")
    if key % 2:
        raise ModelError(f"model: config.json: linear_key_head_dim: expected an even number, got {key}")
    if value % 16:
        raise ModelError(f"model: config.json: linear_value_head_dim: expected a multiple of 16, got {value}")
    net = DeltaNetSpec(key_heads, heads, key, value, raw.get("linear_conv_kernel_dim") or 4, norm)
    return base.mixing([None if kind == "full_attention" else net for kind in raw.get("layer_types") or ()])
