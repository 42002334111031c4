"""OLMoE (Muennighoff et al., 2024): norms of whole queries and keys."""

from __future__ import annotations

from quire.engine.families.base import (
    LAYER_MODULES,
    NORMALIZED_ROUTING,
    DecoderFamily,
    GGUFFormat,
    attention_bias_readers,
    expert_modules,
    moe_reader,
    read_mlp_sized_moe_fields,
)

OLMOE = DecoderFamily(
    model_types=("olmoe",),
    defaults={"rms_norm_eps": 1e-05, "max_position_embeddings": 4096},
    unsupported_fields={"clip_qkv": "of an 'olmoe' is not supported"},
    attention={"qk_norm": "whole", **attention_bias_readers("attention_bias")},
    experts=moe_reader(NORMALIZED_ROUTING),
    gguf=GGUFFormat(
        architectures=("olmoe",),
        layer_modules={**LAYER_MODULES, **expert_modules()},
        read_fields=read_mlp_sized_moe_fields,
    ),
)
