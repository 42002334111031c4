"""K-EXAONE (LG AI Research, 2025): EXAONE 4's attention with pre-norms, and DeepSeek-V3's experts."""

from __future__ import annotations

from quire.engine.families.base import GROUPED_ROUTING, expert_intermediate_size, moe_reader, shared_expert_reader
from quire.engine.families.exaone4 import EXAONE4

EXAONE_MOE = EXAONE4.derive(
    "exaone_moe",
    field_names={"num_shared_experts": "n_shared_experts"},
    defaults={
        **EXAONE4.defaults,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "first_k_dense_replace": 1,
        "n_shared_experts": 1,
    },
    attention={"input_norm": True, "output_norm": False},
    mlp={"input_norm": True, "output_norm": False},
    experts=moe_reader(
        GROUPED_ROUTING,
        size=expert_intermediate_size,
        shared_expert=shared_expert_reader(),
        correction="e_score_correction_bias",
    ),
)
