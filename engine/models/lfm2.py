"""LFM2 (Liquid AI, 2025): gated short convolutions in most layers, attention with a norm of every query and key head in
the others."""

from quire.engine.checkpoint.files import ModelConfig
from quire.engine.layers.attention import AttentionSpec
from quire.engine.layers.norm import NormSpec
from quire.engine.layers.recurrent.short_conv import ShortConvSpec
from quire.engine.models.spec import DecoderSpec, base_spec


def spec(config: ModelConfig) -> DecoderSpec:
    base, raw, norm = base_spec(config).having(AttentionSpec, qk_norm="heads"), config.raw, NormSpec(config.norm_eps)
    conv = ShortConvSpec(config.hidden_size, raw.get("conv_L_cache") or 3, norm, bool(raw.get("conv_bias")))
    return base.mixing([None if "attention" in kind else conv for kind in raw.get("layer_types") or ()])
