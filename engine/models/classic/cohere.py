"""Command R (Cohere, 2024): attention and the MLP side by side on one LayerNorm without a bias, rotations of
neighbours, scaled logits."""

from dataclasses import replace

from quire.engine.checkpoint.files import ModelConfig
from quire.engine.errors import ModelError
from quire.engine.layers.attention import AttentionSpec
from quire.engine.layers.mlp import MlpSpec
from quire.engine.models.classic.layer_norm import layer_norm_spec
from quire.engine.models.spec import DecoderSpec


def spec(config: ModelConfig) -> DecoderSpec:
    raw, bias = config.raw, bool(config.raw.get("attention_bias"))
    if isinstance(scale := raw.get("logit_scale"), str):
        raise ModelError(f"model: config.json: logit_scale: expected float, got {scale!r}")
    norm = "centred" if raw.get("use_qk_norm") else None
    base = replace(layer_norm_spec(config, bias=False), logit_scale=1.0 if scale is None else scale)
    return base.having(AttentionSpec, qk_norm=norm, qkv_bias=bias, out_bias=bias).having(
        MlpSpec, parallel=True, shares_norm=True
    )
