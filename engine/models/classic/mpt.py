"""MPT (MosaicML, 2023): ALiBi, and no biases at all."""

from quire.engine.checkpoint.files import ModelConfig
from quire.engine.errors import ModelError
from quire.engine.layers.attention import AttentionSpec
from quire.engine.models.classic.layer_norm import plain_spec
from quire.engine.models.spec import DecoderSpec


def spec(config: ModelConfig) -> DecoderSpec:
    raw, attention = config.raw, config.raw.get("attn_config") or {}
    if raw.get("no_bias") is False or raw.get("logit_scale") is not None:
        raise ModelError("model: config.json: no_bias: false and logit_scale of an 'mpt' are not supported")
    if attention.get("alibi") is False or any(attention.get(name) for name in ("clip_qkv", "qk_ln", "prefix_lm")):
        raise ModelError(
            "model: config.json: attn_config: without alibi, or with clip_qkv, qk_ln or prefix_lm, it is not supported"
        )
    scale = attention.get("softmax_scale") or config.head_dim**-0.5
    return plain_spec(config, bias=False, norm_bias=False).having(AttentionSpec, rope=None, alibi=1.0, scale=scale)
