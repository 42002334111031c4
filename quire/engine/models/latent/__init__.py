"""Families with latent attention: each as it differs from another."""

from __future__ import annotations

from collections.abc import Mapping

from quire.engine.checkpoint.files import ModelConfig
from quire.engine.layers.norm import NormSpec
from quire.engine.models.experts import GROUPED_EXPERTS, expert_size, mixture, shared, where_sparse
from quire.engine.models.family import Family, SpecOf
from quire.engine.models.latent.attention import latents
from quire.engine.models.values import Fields, given, unless


def _groups(config: ModelConfig) -> int:
    return config.raw.get("n_group") or 1 if config.raw.get("topk_method") == "group_limited_greedy" else 1


def _groups_kept(config: ModelConfig) -> int:
    return min(config.raw.get("topk_group") or _groups(config), _groups(config))


_BEST_GROUPS: Fields = {
    "normalized": False,
    "scale": given("routed_scaling_factor", 1.0),
    "groups": _groups,
    "groups_kept": _groups_kept,
}
"""Groups are chosen by their best expert."""


def _unit(config: ModelConfig) -> float:
    """By which what joins MiniCPM's residual stream is multiplied; the stream is held divided by it, as Granite's."""
    return (config.raw.get("scale_depth") or config.num_layers**0.5) / config.num_layers**0.5


TABLE: Mapping[str, SpecOf] = {
    # Youtu-LLM (Tencent, 2026): DeepSeek-V3's attention with an MLP in every layer.
    "youtu": Family(mixing=latents(neighbours=unless("rope_interleave"))),
    # DeepSeek-V2 and V2-Lite (DeepSeek-AI, 2024): experts behind dense layers.
    "deepseek_v2": Family(
        mixing=latents(), experts=where_sparse(mixture(_BEST_GROUPS, size=expert_size, beside=shared()))
    ),
    # DeepSeek-V3 and R1 (DeepSeek-AI, 2024), Kimi K2 (Moonshot AI, 2025) and GLM-4.7-Flash (Z.ai, 2026): experts that
    # are chosen by sigmoids with a correction.
    **dict.fromkeys(
        ("deepseek_v3", "glm4_moe_lite", "kimi_k2"), Family(like="youtu", experts=where_sparse(GROUPED_EXPERTS))
    ),
    # MiniCPM 3 (OpenBMB, 2024): rotations of halves, and multipliers of embeddings, residuals and logits.
    "minicpm3": Family(
        norm=lambda config: NormSpec(config.norm_eps / _unit(config) ** 2),
        mixing=latents(neighbours=lambda config: False),
        decoder={
            "embedding_scale": lambda config: (config.raw.get("scale_emb") or 12.0) / _unit(config),
            "stream_unit": _unit,
            "logit_scale": lambda config: (config.raw.get("dim_model_base") or config.hidden_size) / config.hidden_size,
        },
    ),
}
