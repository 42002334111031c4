"""GLM-4 in transformers' format (GLM Team, 2024): interleaved RoPE on half of each head."""

from __future__ import annotations

from quire.engine.families.base import GATE_UP_PROJECTIONS, DecoderFamily, WeightNames, flag_reader

GLM = DecoderFamily(
    model_types=("glm",),
    defaults={
        "rms_norm_eps": 1.5625e-07,
        "head_dim": 128,
        "attention_bias": True,
        "partial_rotary_factor": 0.5,
        "max_position_embeddings": 131_072,
    },
    missing_defaults={"num_key_value_heads": 2},
    has_partial_rotary=True,
    attention={"qkv_bias": flag_reader("attention_bias")},
    weight_names=WeightNames(layer_modules={"mlp.gate_up_proj": GATE_UP_PROJECTIONS}, has_interleaved_rope=True),
)
