"""Ministral 3 and related models (Mistral AI, 2025): YaRN, and queries scaled by position."""

from __future__ import annotations

from quire.engine.families.base import DecoderFamily, field_reader

MINISTRAL3 = DecoderFamily(
    model_types=("ministral3",),
    defaults={
        "rms_norm_eps": 1e-05,
        "head_dim": 128,
        "max_position_embeddings": 262_144,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1_000_000.0,
            "factor": 16.0,
            "original_max_position_embeddings": 16384,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale_all_dim": 1.0,
            "mscale": 1.0,
            "llama_4_scaling_beta": 0.1,
        },
    },
    missing_defaults={"num_key_value_heads": 8},
    attention={"window": field_reader("sliding_window")},
)
