"""BLOOM (Le Scao et al., 2022): ALiBi, biases everywhere, and a norm of the embeddings."""

from dataclasses import replace

from quire.engine.checkpoint.files import ModelConfig
from quire.engine.errors import ModelError
from quire.engine.layers.attention import AttentionSpec
from quire.engine.models.classic.layer_norm import plain_spec
from quire.engine.models.spec import DecoderSpec


def spec(config: ModelConfig) -> DecoderSpec:
    if config.raw.get("apply_residual_connection_post_layernorm"):
        raise ModelError("model: config.json: apply_residual_connection_post_layernorm is not supported")
    base = plain_spec(config, bias=True).having(AttentionSpec, rope=None, alibi=1.0)
    return replace(base, embedding_norm=True)
