"""GLM-4.7-Flash (Z.ai, 2026): DeepSeek-V3's layers."""

from __future__ import annotations

from quire.engine.families.deepseek_v3 import DEEPSEEK_V3

GLM4_MOE_LITE = DEEPSEEK_V3.derive(
    "glm4_moe_lite",
    defaults={
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 192,
        "v_head_dim": 256,
        "rms_norm_eps": 1e-05,
        "n_shared_experts": 1,
        "routed_scaling_factor": 1.8,
        "norm_topk_prob": True,
        "first_k_dense_replace": 1,
        "max_position_embeddings": 202_752,
    },
    missing_defaults={"q_lora_rank": 768},
)
