"""Gemma (Gemma Team, 2024): GELU gate, scaled embeddings, tied head, norm weights stored as offsets from 1."""

from __future__ import annotations

from quire.engine.architecture import NormSpec
from quire.engine.families.base import DecoderFamily, GGUFFormat, attention_bias_readers

GEMMA = DecoderFamily(
    model_types=("gemma",),
    defaults={"tie_word_embeddings": True, "head_dim": 256, "max_position_embeddings": 8192},
    norm=lambda config: NormSpec(config.norm_eps, weight_offset=1.0),
    attention=attention_bias_readers("attention_bias"),
    mlp={"activation": "gelu_tanh"},
    decoder={"embedding_scale": lambda config: config.hidden_size**0.5},
    gguf=GGUFFormat(
        architectures=("gemma",),
    ),
)
