"""Mistral 7B and related models (Jiang et al., 2023): an optional sliding window in every layer."""

from __future__ import annotations

from quire.engine.families.base import DecoderFamily

MISTRAL = DecoderFamily(
    model_types=("mistral",),
    defaults={"max_position_embeddings": 131_072},
    missing_defaults={"num_key_value_heads": 8, "sliding_window": 4096},
    multimodal_text_defaults={
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "vocab_size": 32000,
        "intermediate_size": 14336,
        "num_key_value_heads": 8,
    },
    attention={"window": lambda config: config.raw.get("sliding_window", 4096) or None},
)
