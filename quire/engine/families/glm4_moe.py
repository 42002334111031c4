"""GLM-4.5 to 4.7 (GLM Team, 2025): partial RoPE, DeepSeek-V3's experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.engine.families.base import (
    GROUPED_MOE,
    LAYER_MODULES,
    DecoderFamily,
    GGUFFormat,
    GGUFMetadata,
    expert_modules,
    flag_reader,
    read_moe_fields,
    shared_expert_modules,
)


def _read_glm4_moe_gguf_fields(metadata: GGUFMetadata, fields: Mapping[str, Any]) -> dict[str, Any]:
    return read_moe_fields(metadata) | {"use_qk_norm": metadata.has_tensor("blk.0.attn_q_norm.weight")}


GLM4_MOE = DecoderFamily(
    model_types=("glm4_moe",),
    field_names={"n_routed_experts": "num_local_experts", "num_mtp_layers": "num_nextn_predict_layers"},
    defaults={
        "rms_norm_eps": 1e-05,
        "norm_topk_prob": True,
        "partial_rotary_factor": 0.5,
        "first_k_dense_replace": 1,
        "n_shared_experts": 1,
        "max_position_embeddings": 131_072,
    },
    missing_defaults={"num_key_value_heads": 8},
    has_partial_rotary=True,
    attention={
        "qk_norm": lambda config: "heads" if config.raw.get("use_qk_norm") else None,
        "qkv_bias": flag_reader("attention_bias"),
    },
    experts=GROUPED_MOE,
    gguf=GGUFFormat(
        architectures=("glm4moe",),
        layer_modules={
            **LAYER_MODULES,
            **expert_modules(),
            **shared_expert_modules(),
            "post_attention_norm": "post_attention_layernorm",
        },
        read_fields=_read_glm4_moe_gguf_fields,
    ),
)
