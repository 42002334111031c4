"""DeepSeek-V2 and V2-Lite (DeepSeek-AI, 2024): latent attention, and experts behind dense layers, whose groups are
chosen by their best expert."""

from __future__ import annotations

from quire.engine.families.base.config_fields import SpecFields, field_reader
from quire.engine.families.base.family import Family
from quire.engine.families.base.mla_fields import mla_mixers_reader
from quire.engine.families.base.model_config import ModelConfig
from quire.engine.families.base.moe_fields import (
    expert_intermediate_size,
    moe_reader,
    optional_moe_reader,
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
DEEPSEEK_V2 = Family(
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
)
