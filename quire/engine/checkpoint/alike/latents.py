"""What a config.json with latent attention means by the fields that it leaves out. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_DEEPSEEK = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}
_DEEPSEEK_3 = _DEEPSEEK | {
    "n_group": 8,
    "topk_group": 4,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
    "first_k_dense_replace": 3,
}
LEFT_OUT: Mapping[str, Mapping[str, Any]] = {
    "deepseek_v2": _DEEPSEEK | {"n_shared_experts": 2},
    "deepseek_v3": _DEEPSEEK_3,
    "glm4_moe_lite": _DEEPSEEK
    | {
        "qk_nope_head_dim": 192,
        "v_head_dim": 256,
        "rms_norm_eps": 1e-5,
        "n_shared_experts": 1,
        "routed_scaling_factor": 1.8,
        "norm_topk_prob": True,
        "first_k_dense_replace": 1,
    },
    "kimi_k2": _DEEPSEEK_3,
    "minicpm3": {
        "tie_word_embeddings": True,
        "rms_norm_eps": 1e-5,
        "kv_lora_rank": 256,
        "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 32,
        "scale_emb": 12.0,
        "scale_depth": 1.4,
        "dim_model_base": 256,
    },
    "youtu": _DEEPSEEK | {"tie_word_embeddings": True},
}
"""By model_type, as LEFT_OUT of left_out.py has it."""


def complete(found: dict[str, Any]) -> None:
    """The sizes of heads that follow from others. A head's size is that of what is rotated, as transformers has it."""
    hidden, heads = found.get("hidden_size"), found.get("num_attention_heads")
    if found.get("v_head_dim") is None and isinstance(hidden, int) and isinstance(heads, int) and heads > 0:
        found["v_head_dim"] = hidden // heads
    if isinstance(found.get("qk_rope_head_dim"), int):
        found["head_dim"] = found["qk_rope_head_dim"]
