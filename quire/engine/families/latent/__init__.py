"""Families with latent attention: each as it differs from another."""

from __future__ import annotations

from collections.abc import Mapping

from quire.engine.architecture.norm import NormSpec
from quire.engine.checkpoint.files import ModelConfig
from quire.engine.families.config_fields import SpecFields, default_true_reader, field_reader
from quire.engine.families.family import Family, FamilyEntry
from quire.engine.families.latent.mla_fields import mla_mixers_reader
from quire.engine.families.moe_fields import (
    GROUPED_MOE,
    expert_intermediate_size,
    moe_reader,
    optional_moe_reader,
    shared_expert_reader,
)


def _num_groups(config: ModelConfig) -> int:
    return config.raw.get("n_group") or 1 if config.raw.get("topk_method") == "group_limited_greedy" else 1


def _top_k_groups(config: ModelConfig) -> int:
    return min(config.raw.get("topk_group") or _num_groups(config), _num_groups(config))


_BEST_GROUPS_ROUTING: SpecFields = {
    "is_normalized": False,
    "scale": field_reader("routed_scaling_factor", 1.0),
    "num_groups": _num_groups,
    "top_k_groups": _top_k_groups,
}
"""Groups are chosen by their best expert."""


def _residual_multiplier(config: ModelConfig) -> float:
    """By which what joins MiniCPM's residual stream is multiplied; the stream is held divided by it, as Granite's."""
    return (config.raw.get("scale_depth") or config.num_layers**0.5) / config.num_layers**0.5


TABLE: Mapping[str, FamilyEntry] = {
    # Youtu-LLM (Tencent, 2026): DeepSeek-V3's attention with an MLP in every layer.
    "youtu": Family(mixers=mla_mixers_reader(is_interleaved=default_true_reader("rope_interleave"))),
    # DeepSeek-V2 and V2-Lite (DeepSeek-AI, 2024): experts behind dense layers.
    "deepseek_v2": Family(
        mixers=mla_mixers_reader(),
        experts=optional_moe_reader(
            moe_reader(_BEST_GROUPS_ROUTING, size=expert_intermediate_size, shared_expert=shared_expert_reader())
        ),
    ),
    # DeepSeek-V3 and R1 (DeepSeek-AI, 2024), Kimi K2 (Moonshot AI, 2025) and GLM-4.7-Flash (Z.ai, 2026): experts that
    # are chosen by sigmoids with a correction.
    **dict.fromkeys(
        ("deepseek_v3", "glm4_moe_lite", "kimi_k2"), Family(base="youtu", experts=optional_moe_reader(GROUPED_MOE))
    ),
    # MiniCPM 3 (OpenBMB, 2024): rotations of halves, and multipliers of embeddings, residuals and logits.
    "minicpm3": Family(
        norm=lambda config: NormSpec(config.norm_eps / _residual_multiplier(config) ** 2),
        mixers=mla_mixers_reader(is_interleaved=lambda config: False),
        decoder={
            "embedding_scale": lambda config: (config.raw.get("scale_emb") or 12.0) / _residual_multiplier(config),
            "residual_multiplier": _residual_multiplier,
            "logit_scale": lambda config: (config.raw.get("dim_model_base") or config.hidden_size) / config.hidden_size,
        },
    ),
}
