"""OPT (Zhang et al., 2022): GPT-2 with ReLUs."""

from dataclasses import replace

from quire.engine.checkpoint.files import ModelConfig
from quire.engine.errors import ModelError
from quire.engine.layers.attention import AttentionSpec
from quire.engine.models.classic.layer_norm import plain_spec
from quire.engine.models.spec import DecoderSpec


def spec(config: ModelConfig) -> DecoderSpec:
    raw = config.raw
    for name in ("do_layer_norm_before", "layer_norm_elementwise_affine"):
        if raw.get(name) is False:
            raise ModelError(f"model: config.json: {name}: false is not supported")
    if raw.get("word_embed_proj_dim") not in (None, config.hidden_size):
        raise ModelError("model: config.json: word_embed_proj_dim: embeddings of another size are not supported")
    base = plain_spec(config, bias=raw.get("enable_bias") is not False)
    return replace(base.having(AttentionSpec, rope=None), positions=config.max_position)
