"""Bamba (IBM, 2024): Llama with partial RoPE, and Mamba-2 in most layers."""

from __future__ import annotations

from typing import Any

from quire.engine.families.base import (
    FEED_FORWARD_MODULES,
    MAMBA2_DEFAULTS,
    MAMBA2_PROJECTIONS,
    WeightNames,
    check_mamba2_width,
    fill_hybrid_layer_types,
    fill_mamba2_head_dim,
    hybrid_mixers_reader,
    mamba2_spec,
)
from quire.engine.families.llama import LLAMA


def _fill_bamba_fields(fields: dict[str, Any]) -> None:
    listed = fields.get("attn_layer_indices")
    attention_layers = {each for each in listed if isinstance(each, int)} if isinstance(listed, list) else set()
    fill_hybrid_layer_types(fields, lambda layer: "full_attention" if layer in attention_layers else "linear_attention")
    fill_mamba2_head_dim(fields)


BAMBA = LLAMA.derive(
    "bamba",
    field_names={"layers_block_type": "layer_types"},
    defaults={
        **MAMBA2_DEFAULTS,
        "rms_norm_eps": 1e-05,
        "num_key_value_heads": 8,
        "partial_rotary_factor": 0.5,
        "max_position_embeddings": 262_144,
    },
    has_partial_rotary=True,
    fill_derived_fields=_fill_bamba_fields,
    check_config=check_mamba2_width,
    other_layer_types=("linear_attention",),
    mixers=hybrid_mixers_reader(mamba2_spec),
    weight_names=WeightNames(
        model_modules={"final_layernorm": "norm"},
        layer_modules={
            "mamba.in_proj": MAMBA2_PROJECTIONS,
            "pre_ff_layernorm": "post_attention_layernorm",
            **FEED_FORWARD_MODULES,
        },
    ),
)
