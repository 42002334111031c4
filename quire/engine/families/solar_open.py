"""Solar Open (Upstage, 2026): GLM-4.5's layers."""

from __future__ import annotations

from quire.engine.families.glm4_moe import GLM4_MOE

SOLAR_OPEN = GLM4_MOE.derive(
    "solar_open",
    defaults={
        "rms_norm_eps": 1e-05,
        "head_dim": 128,
        "intermediate_size": 512,
        "norm_topk_prob": True,
        "n_shared_experts": 1,
        "rope_theta": 1_000_000.0,
        "max_position_embeddings": 131_072,
    },
)
