"""What a GGUF file of the architecture deepseek2 says: DeepSeek-V2, V3 and R1, Kimi K2, GLM-4.7-Flash, Youtu-LLM."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.engine.errors import ModelError
from quire.engine.gguf.header import GGUFHeader

DEEPSEEK2_ARCH = "deepseek2"
_SOFTMAX_GATING, _SIGMOID_GATING = 1, 2
"""How routers weigh experts, by llama.cpp's numbers."""
_DEEPSEEK_V3_EXPERTS = 256
"""Experts of DeepSeek-V3, whose older files do not say that it has 8 groups of them, of which 4 are chosen from."""


def deepseek_model_type(header: GGUFHeader) -> str:
    """The model_type. Raises ModelError."""
    if not header.get_integer(f"{DEEPSEEK2_ARCH}.expert_count"):
        return "youtu"
    gating = header.get_integer(key := f"{DEEPSEEK2_ARCH}.expert_gating_func") or _SOFTMAX_GATING
    if gating not in (_SOFTMAX_GATING, _SIGMOID_GATING):
        raise ModelError(f"model: {header.name}: {key}: {gating} is not served (1: softmax, 2: sigmoid)")
    normalized = header.get_bool(key := f"{DEEPSEEK2_ARCH}.expert_weights_norm")
    if gating == _SOFTMAX_GATING and normalized:
        raise ModelError(f"model: {header.name}: {key}: softmax weights that are normalized are not served there")
    return "deepseek_v3" if gating == _SIGMOID_GATING else "deepseek_v2"


def deepseek_fields(header: GGUFHeader, model_type: str) -> dict[str, Any]:
    """What config.json would have beside the sizes of every family. Newer files have the sizes of keys and values as
    they are cached, and those of heads under names of their own."""
    rotated = header.get_integer(f"{DEEPSEEK2_ARCH}.rope.dimension_count")
    key = header.get_integer(f"{DEEPSEEK2_ARCH}.attention.key_length_mla") or header.get_integer(
        f"{DEEPSEEK2_ARCH}.attention.key_length"
    )
    value = header.get_integer(f"{DEEPSEEK2_ARCH}.attention.value_length_mla") or header.get_integer(
        f"{DEEPSEEK2_ARCH}.attention.value_length"
    )
    experts, groups = (
        header.get_integer(f"{DEEPSEEK2_ARCH}.expert_count"),
        header.get_integer(f"{DEEPSEEK2_ARCH}.expert_group_count"),
    )
    num_used_groups = header.get_integer(f"{DEEPSEEK2_ARCH}.expert_group_used_count")
    if groups is None:
        groups, num_used_groups = (8, 4) if experts == _DEEPSEEK_V3_EXPERTS and model_type == "deepseek_v3" else (1, 1)
    config_fields = {
        "num_key_value_heads": header.get_integer(f"{DEEPSEEK2_ARCH}.attention.head_count"),
        "head_dim": rotated,
        "kv_lora_rank": header.get_integer(f"{DEEPSEEK2_ARCH}.attention.kv_lora_rank"),
        "q_lora_rank": header.get_integer(f"{DEEPSEEK2_ARCH}.attention.q_lora_rank"),
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": None if key is None or rotated is None else key - rotated,
        "v_head_dim": value,
    }
    if not experts:
        return config_fields
    return config_fields | {
        "num_local_experts": experts,
        "num_experts_per_tok": header.get_integer(f"{DEEPSEEK2_ARCH}.expert_used_count"),
        "moe_intermediate_size": header.get_integer(f"{DEEPSEEK2_ARCH}.expert_feed_forward_length"),
        "n_shared_experts": header.get_integer(f"{DEEPSEEK2_ARCH}.expert_shared_count") or 0,
        "first_k_dense_replace": header.get_integer(f"{DEEPSEEK2_ARCH}.leading_dense_block_count") or 0,
        "routed_scaling_factor": header.get_float(f"{DEEPSEEK2_ARCH}.expert_weights_scale") or 1.0,
        "norm_topk_prob": bool(header.get_bool(f"{DEEPSEEK2_ARCH}.expert_weights_norm")),
        "n_group": groups,
        "topk_group": num_used_groups or groups,
        "topk_method": "group_limited_greedy" if model_type == "deepseek_v2" and groups > 1 else None,
        "num_nextn_predict_layers": header.get_integer(f"{DEEPSEEK2_ARCH}.nextn_predict_layers"),
    }


def with_yarn_mscale(header: GGUFHeader, rope: Mapping[str, Any]) -> dict[str, Any]:
    """Its rotations as rope_parameters: files say by how much scores grow with YaRN, and that of mscale_all_dim
    alone, which all published models' mscale equals."""
    grows = header.get_float(f"{DEEPSEEK2_ARCH}.rope.scaling.yarn_log_multiplier")
    if rope["rope_type"] != "yarn" or not grows:
        return dict(rope)
    scale = round(grows / 0.1, 6)
    return dict(rope) | {"mscale": scale, "mscale_all_dim": scale}
