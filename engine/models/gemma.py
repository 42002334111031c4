"""Gemma (Gemma Team, 2024): a GELU gate, scaled embeddings, a tied head, and norms whose weights are offsets from 1."""

from quire.engine.checkpoint.files import ModelConfig
from quire.engine.models.decoder import DecoderSpec, base_spec


def spec(config: ModelConfig) -> DecoderSpec:
    return DecoderSpec(
        **base_spec(config) | {"tie_embeddings": bool(config.raw.get("tie_word_embeddings", True))},
        norm_offset=1.0,
        gelu=True,
        embedding_scale=config.hidden_size**0.5,
    )
