"""GPT-NeoX and Pythia (Black et al., 2022): parallel attention and MLP with separate norms."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.engine.families.base import (
    QKV_PROJECTIONS,
    GGUFFormat,
    GGUFMetadata,
    WeightNames,
    default_true_reader,
    layer_norm_family,
)

MEGATRON_MLP_MODULES = {"mlp.dense_h_to_4h": "mlp.up_proj", "mlp.dense_4h_to_h": "mlp.down_proj"}


def _read_gpt_neox_gguf_fields(metadata: GGUFMetadata, fields: Mapping[str, Any]) -> dict[str, Any]:
    return {"use_parallel_residual": metadata.flag("use_parallel_residual")}


GPT_NEOX = layer_norm_family(
    model_types=("gpt_neox",),
    field_names={
        "layer_norm_eps": "rms_norm_eps",
        "rotary_emb_base": "rope_theta",
        "rotary_pct": "partial_rotary_factor",
    },
    defaults={"rms_norm_eps": 1e-05, "hidden_act": "gelu", "attention_bias": True, "partial_rotary_factor": 0.25},
    has_partial_rotary=True,
    attention={
        "qkv_bias": default_true_reader("attention_bias"),
        "out_bias": default_true_reader("attention_bias"),
    },
    mlp={"parallel": default_true_reader("use_parallel_residual")},
    weight_names=WeightNames(
        model_modules={"embed_in": "embed_tokens", "final_layer_norm": "norm", "embed_out": "lm_head"},
        layer_modules={
            **MEGATRON_MLP_MODULES,
            "attention.query_key_value": QKV_PROJECTIONS,
            "attention.dense": "self_attn.o_proj",
        },
        is_fused_by_kv_head=True,
        unused_tensors=("attention.bias", "attention.masked_bias", "attention.rotary_emb.inv_freq"),
    ),
    gguf=GGUFFormat(
        architectures=("gptneox",),
        read_fields=_read_gpt_neox_gguf_fields,
    ),
)
