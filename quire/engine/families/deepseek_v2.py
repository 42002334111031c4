"""DeepSeek-V2 and V2-Lite (DeepSeek-AI, 2024): MLA, and experts after dense layers. Groups of experts are ranked by
their best expert.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.engine.families.base import (
    LAYER_MODULES,
    DecoderFamily,
    GGUFFormat,
    GGUFMetadata,
    ModelConfig,
    SpecFields,
    expert_intermediate_size,
    expert_modules,
    field_reader,
    mla_mixers_reader,
    moe_reader,
    optional_moe_reader,
    shared_expert_modules,
    shared_expert_reader,
)


def _num_groups(config: ModelConfig) -> int:
    return config.raw.get("n_group") or 1 if config.raw.get("topk_method") == "group_limited_greedy" else 1


def _top_k_groups(config: ModelConfig) -> int:
    return min(config.raw.get("topk_group") or _num_groups(config), _num_groups(config))


_ROUTING: SpecFields = {
    "is_normalized": False,
    "scale": field_reader("routed_scaling_factor", 1.0),
    "num_groups": _num_groups,
    "top_k_groups": _top_k_groups,
}


_SOFTMAX_GATING, _SIGMOID_GATING = 1, 2
"""llama.cpp's values of expert_gating_func."""
_DEEPSEEK_V3_NUM_EXPERTS = 256
"""Older files do not record that DeepSeek-V3 chooses 4 of 8 groups."""
MLA_GGUF_MODULES = {
    **LAYER_MODULES,
    **expert_modules(),
    **shared_expert_modules(),
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
    "attn_k_b": "self_attn.k_b_proj",
    "attn_v_b": "self_attn.v_b_proj",
}


def gguf_uses_sigmoid_gating(metadata: GGUFMetadata) -> bool:
    """Raises ModelError for other gating functions."""
    gating = metadata.integer("expert_gating_func") or _SOFTMAX_GATING
    if gating not in (_SOFTMAX_GATING, _SIGMOID_GATING):
        raise metadata.field_error("expert_gating_func", f"{gating} is not served (1: softmax, 2: sigmoid)")
    if gating == _SOFTMAX_GATING and metadata.flag("expert_weights_norm"):
        raise metadata.field_error("expert_weights_norm", "softmax weights that are normalized are not served there")
    return gating == _SIGMOID_GATING


def read_mla_gguf_fields(metadata: GGUFMetadata, fields: Mapping[str, Any]) -> dict[str, Any]:
    """In newer files, attention.key_length is the size of cached keys."""
    rotated = metadata.integer("rope.dimension_count")
    key = metadata.integer("attention.key_length_mla") or metadata.integer("attention.key_length")
    value = metadata.integer("attention.value_length_mla") or metadata.integer("attention.value_length")
    return {
        "num_key_value_heads": metadata.integer("attention.head_count"),
        "head_dim": rotated,
        "kv_lora_rank": metadata.integer("attention.kv_lora_rank"),
        "q_lora_rank": metadata.integer("attention.q_lora_rank"),
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": None if key is None or rotated is None else key - rotated,
        "v_head_dim": value,
        "rope_parameters": _with_yarn_mscale(metadata, fields["rope_parameters"]),
    }


def _with_yarn_mscale(metadata: GGUFMetadata, rope: Mapping[str, Any]) -> Mapping[str, Any]:
    """mscale_all_dim and mscale are equal in published models."""
    growth = metadata.float("rope.scaling.yarn_log_multiplier")
    if rope["rope_type"] != "yarn" or not growth:
        return rope
    scale = round(growth / 0.1, 6)
    return {**rope, "mscale": scale, "mscale_all_dim": scale}


def read_mla_moe_gguf_fields(metadata: GGUFMetadata, fields: Mapping[str, Any]) -> dict[str, Any]:
    experts, groups = metadata.integer("expert_count"), metadata.integer("expert_group_count")
    used_groups = metadata.integer("expert_group_used_count")
    if groups is None:
        is_v3 = experts == _DEEPSEEK_V3_NUM_EXPERTS and gguf_uses_sigmoid_gating(metadata)
        groups, used_groups = (8, 4) if is_v3 else (1, 1)
    return read_mla_gguf_fields(metadata, fields) | {
        "num_local_experts": experts,
        "num_experts_per_tok": metadata.integer("expert_used_count"),
        "moe_intermediate_size": metadata.integer("expert_feed_forward_length"),
        "n_shared_experts": metadata.integer("expert_shared_count") or 0,
        "first_k_dense_replace": metadata.integer("leading_dense_block_count") or 0,
        "routed_scaling_factor": metadata.float("expert_weights_scale") or 1.0,
        "norm_topk_prob": bool(metadata.flag("expert_weights_norm")),
        "n_group": groups,
        "topk_group": used_groups or groups,
        "topk_method": "group_limited_greedy" if groups > 1 and not gguf_uses_sigmoid_gating(metadata) else None,
        "num_nextn_predict_layers": metadata.integer("nextn_predict_layers"),
    }


DEEPSEEK_V2 = DecoderFamily(
    model_types=("deepseek_v2",),
    field_names={"n_routed_experts": "num_local_experts", "num_mtp_layers": "num_nextn_predict_layers"},
    defaults={
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
        "n_shared_experts": 2,
    },
    missing_defaults={"q_lora_rank": 1536},
    mixers=mla_mixers_reader(),
    experts=optional_moe_reader(
        moe_reader(_ROUTING, size=expert_intermediate_size, shared_expert=shared_expert_reader())
    ),
    gguf=GGUFFormat(
        architectures=("deepseek2",),
        matches=lambda metadata: bool(metadata.integer("expert_count")) and not gguf_uses_sigmoid_gating(metadata),
        layer_modules=MLA_GGUF_MODULES,
        has_latent_attention=True,
        read_fields=read_mla_moe_gguf_fields,
    ),
)
