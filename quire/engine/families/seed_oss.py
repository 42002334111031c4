"""Seed-OSS (ByteDance Seed, 2025): Llama with QKV biases."""

from __future__ import annotations

from quire.engine.families.base import LAYER_MODULES, GGUFFormat, flag_reader
from quire.engine.families.llama import LLAMA

SEED_OSS = LLAMA.derive(
    "seed_oss",
    defaults={"attention_bias": True, "head_dim": 128, "max_position_embeddings": 524_288},
    missing_defaults={"num_key_value_heads": 8},
    attention={"out_bias": flag_reader("attention_out_bias")},
    gguf=GGUFFormat(
        architectures=("seed_oss",),
        layer_modules={**LAYER_MODULES, "post_attention_norm": "post_attention_layernorm"},
    ),
)
