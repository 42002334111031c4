from __future__ import annotations

from quire.engine.architecture.attention import AttentionLayerSpec
from quire.engine.architecture.decoder import DecoderSpec
from quire.engine.architecture.mlp import MLPSpec
from quire.engine.architecture.norm import NormSpec
from quire.engine.families.base.model_config import ModelConfig


def base_decoder_spec(config: ModelConfig) -> DecoderSpec:
    heads, norm = (config.num_heads, config.num_kv_heads, config.head_dim), NormSpec(config.norm_eps)
    layer = (
        AttentionLayerSpec(*heads, scale=config.head_dim**-0.5, rope=config.rope, norm=norm),
        MLPSpec(config.intermediate_size, norm),
    )
    shape = (config.vocab_size, config.hidden_size)
    return DecoderSpec(*shape, (layer,) * config.num_layers, norm, tie_embeddings=config.tie_embeddings)
