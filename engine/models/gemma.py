"""Gemma (Gemma Team, 2024): a GELU gate, scaled embeddings, a tied head, and norms whose weights are offsets from 1."""

from dataclasses import replace

from quire.engine.checkpoint.files import ModelConfig
from quire.engine.layers.mlp import MlpSpec
from quire.engine.models.spec import DecoderSpec, base_spec


def spec(config: ModelConfig) -> DecoderSpec:
    tied, base = bool(config.raw.get("tie_word_embeddings", True)), base_spec(config, norm_offset=1.0)
    return replace(
        base.having(MlpSpec, activation="gelu_tanh"), tie_embeddings=tied, embedding_scale=config.hidden_size**0.5
    )
