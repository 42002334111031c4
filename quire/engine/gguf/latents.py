"""What a GGUF file of the architecture deepseek2 says: DeepSeek-V2, V3 and R1, Kimi K2, GLM-4.7-Flash, Youtu-LLM."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.engine.errors import ModelError
from quire.engine.gguf.header import Header

ARCH = "deepseek2"
_SOFTMAX, _SIGMOID = 1, 2
"""How routers weigh experts, by llama.cpp's numbers."""
_OF_V3 = 256
"""Experts of DeepSeek-V3, whose older files do not say that it has 8 groups of them, of which 4 are chosen from."""


def family(header: Header) -> str:
    """The model_type. Raises ModelError."""
    if not header.integer(f"{ARCH}.expert_count"):
        return "youtu"
    given = header.integer(key := f"{ARCH}.expert_gating_func") or _SOFTMAX
    if given not in (_SOFTMAX, _SIGMOID):
        raise ModelError(f"model: {header.name}: {key}: {given} is not served (1: softmax, 2: sigmoid)")
    normalized = header.flag(key := f"{ARCH}.expert_weights_norm")
    if given == _SOFTMAX and normalized:
        raise ModelError(f"model: {header.name}: {key}: softmax weights that are normalized are not served there")
    return "deepseek_v3" if given == _SIGMOID else "deepseek_v2"


def fields(header: Header, kind: str) -> dict[str, Any]:
    """What config.json would have beside the sizes of every family. Newer files have the sizes of keys and values as
    they are cached, and those of heads under names of their own."""
    rotated = header.integer(f"{ARCH}.rope.dimension_count")
    key = header.integer(f"{ARCH}.attention.key_length_mla") or header.integer(f"{ARCH}.attention.key_length")
    value = header.integer(f"{ARCH}.attention.value_length_mla") or header.integer(f"{ARCH}.attention.value_length")
    experts, groups = header.integer(f"{ARCH}.expert_count"), header.integer(f"{ARCH}.expert_group_count")
    chosen = header.integer(f"{ARCH}.expert_group_used_count")
    if groups is None:
        groups, chosen = (8, 4) if experts == _OF_V3 and kind == "deepseek_v3" else (1, 1)
    found = {
        "num_key_value_heads": header.integer(f"{ARCH}.attention.head_count"),
        "head_dim": rotated,
        "kv_lora_rank": header.integer(f"{ARCH}.attention.kv_lora_rank"),
        "q_lora_rank": header.integer(f"{ARCH}.attention.q_lora_rank"),
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": None if key is None or rotated is None else key - rotated,
        "v_head_dim": value,
    }
    if not experts:
        return found
    return found | {
        "num_local_experts": experts,
        "num_experts_per_tok": header.integer(f"{ARCH}.expert_used_count"),
        "moe_intermediate_size": header.integer(f"{ARCH}.expert_feed_forward_length"),
        "n_shared_experts": header.integer(f"{ARCH}.expert_shared_count") or 0,
        "first_k_dense_replace": header.integer(f"{ARCH}.leading_dense_block_count") or 0,
        "routed_scaling_factor": header.number(f"{ARCH}.expert_weights_scale") or 1.0,
        "norm_topk_prob": bool(header.flag(f"{ARCH}.expert_weights_norm")),
        "n_group": groups,
        "topk_group": chosen or groups,
        "topk_method": "group_limited_greedy" if kind == "deepseek_v2" and groups > 1 else None,
        "num_nextn_predict_layers": header.integer(f"{ARCH}.nextn_predict_layers"),
    }


def yarn(header: Header, rope: Mapping[str, Any]) -> dict[str, Any]:
    """Its rotations as rope_parameters: files say by how much scores grow with YaRN, and that of mscale_all_dim
    alone, which all published models' mscale equals."""
    grows = header.number(f"{ARCH}.rope.scaling.yarn_log_multiplier")
    if rope["rope_type"] != "yarn" or not grows:
        return dict(rope)
    scale = round(grows / 0.1, 6)
    return dict(rope) | {"mscale": scale, "mscale_all_dim": scale}
