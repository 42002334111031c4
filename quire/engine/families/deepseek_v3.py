"""DeepSeek-V3 and R1 (DeepSeek-AI, 2024), and Kimi K2 (Moonshot AI, 2025): experts that are chosen by sigmoids with a
correction."""

from __future__ import annotations

from quire.engine.families.base.moe_fields import GROUPED_MOE, optional_moe_reader
from quire.engine.families.youtu import YOUTU

DEEPSEEK_V3 = YOUTU.derive(
    "deepseek_v3",
    field_names={"n_routed_experts": "num_local_experts", "num_mtp_layers": "num_nextn_predict_layers"},
    defaults={
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
        "n_group": 8,
        "topk_group": 4,
        "num_experts_per_tok": 8,
        "n_shared_experts": 1,
        "routed_scaling_factor": 2.5,
        "norm_topk_prob": True,
        "first_k_dense_replace": 3,
        "max_position_embeddings": 4096,
    },
    experts=optional_moe_reader(GROUPED_MOE),
)
KIMI_K2 = DEEPSEEK_V3.derive(
    "kimi_k2",
    defaults={
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
        "n_group": 8,
        "topk_group": 4,
        "num_experts_per_tok": 8,
        "n_shared_experts": 1,
        "routed_scaling_factor": 2.5,
        "norm_topk_prob": True,
        "first_k_dense_replace": 3,
    },
    missing_defaults={},
)
