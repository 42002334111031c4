"""ERNIE 4.5, dense (Baidu, 2025): interleaved RoPE, and biases in all linears or none."""

from __future__ import annotations

from quire.engine.families.base import DecoderFamily, GGUFFormat, WeightNames, attention_bias_readers, flag_reader

ERNIE4_5 = DecoderFamily(
    model_types=("ernie4_5",),
    defaults={
        "tie_word_embeddings": True,
        "rms_norm_eps": 1e-05,
        "head_dim": 128,
        "rope_theta": 500_000.0,
        "max_position_embeddings": 131_072,
    },
    missing_defaults={"num_key_value_heads": 2},
    attention=attention_bias_readers("use_bias"),
    mlp={"bias": flag_reader("use_bias")},
    weight_names=WeightNames(has_interleaved_rope=True),
    gguf=GGUFFormat(
        architectures=("ernie4_5",),
    ),
)
