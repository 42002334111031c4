"""Mixtral (Jiang et al., 2024): Mistral with experts in every layer, and a window only if config.json has one."""

from __future__ import annotations

from quire.engine.families.base import (
    BLOCK_SPARSE_MOE,
    LAYER_MODULES,
    MIXTRAL_EXPERT_MODULES,
    DecoderFamily,
    GGUFFormat,
    field_reader,
    moe_reader,
)

MIXTRAL = DecoderFamily(
    model_types=("mixtral",),
    defaults={"rms_norm_eps": 1e-05, "rope_theta": 1_000_000.0, "max_position_embeddings": 131_072},
    missing_defaults={"num_key_value_heads": 8},
    attention={"window": field_reader("sliding_window")},
    experts=moe_reader(**BLOCK_SPARSE_MOE),
    gguf=GGUFFormat(
        architectures=("llama",),
        layer_modules={**LAYER_MODULES, **MIXTRAL_EXPERT_MODULES},
        matches=lambda metadata: bool(metadata.integer("expert_count")),
        permutes_queries_and_keys=True,
    ),
)
