"""MiniMax-M2 (MiniMax, 2025): sigmoid routing, norms of whole queries and keys, partial RoPE."""

from __future__ import annotations

from quire.engine.families.base import (
    BLOCK_SPARSE_MOE,
    LAYER_MODULES,
    MIXTRAL_EXPERT_MODULES,
    DecoderFamily,
    GGUFFormat,
    moe_reader,
    read_mlp_sized_moe_fields,
)

MINIMAX_M2 = DecoderFamily(
    model_types=("minimax_m2",),
    defaults={"rope_theta": 5_000_000.0, "head_dim": 128, "max_position_embeddings": 196_608},
    missing_defaults={"num_key_value_heads": 8},
    has_partial_rotary=True,
    attention={"qk_norm": "whole"},
    experts=moe_reader(
        {"score_function": "sigmoid"}, float_router=True, correction="e_score_correction_bias", **BLOCK_SPARSE_MOE
    ),
    gguf=GGUFFormat(
        architectures=("minimax-m2",),
        layer_modules={**LAYER_MODULES, **MIXTRAL_EXPERT_MODULES},
        layer_tensors={"exp_probs_b.bias": "block_sparse_moe.e_score_correction_bias"},
        read_fields=read_mlp_sized_moe_fields,
    ),
)
