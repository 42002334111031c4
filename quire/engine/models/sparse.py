"""Families with mixtures of experts in an MLP's place."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from quire.engine.checkpoint.files import ModelConfig
from quire.engine.errors import ModelError
from quire.engine.layers.moe import ExpertsSpec
from quire.engine.layers.norm import NormSpec
from quire.engine.layers.rope import Growth
from quire.engine.models.dense import phi3_rope, some_ropes, two_ropes
from quire.engine.models.experts import (
    GATED_EXPERTS,
    GROUPED,
    GROUPED_EXPERTS,
    NORMALIZED,
    expert_size,
    mixture,
    shared,
    where_sparse,
)
from quire.engine.models.family import Family, SpecOf, windows
from quire.engine.models.values import Fields, biased, flag, given, unless
from quire.kernels.activation import Clamp

_NUMBERED: Fields = {"gate": "w1", "up": "w3", "down": "w2"}
"""What Mixtral, and others after it, call an expert's linears,"""
_BLOCK: Fields = {"name": "block_sparse_moe", **_NUMBERED}
"""and what these are in."""
_GRANITE_EXPERTS = mixture(beside=shared(), name="block_sparse_moe", router="router.layer")


def _clamp(config: ModelConfig) -> Clamp:
    return Clamp(config.raw.get("swiglu_alpha") or 1.702, config.raw.get("swiglu_limit") or 7.0)


def _least_sum(config: ModelConfig) -> float:
    """Of chosen weights, by which they are divided: what is as small as published models' may be added to it."""
    least = config.raw.get("moe_norm_min") or 0.0
    if least > 1e-6:
        raise ModelError(f"model: config.json: moe_norm_min: at most 1e-06 is served, got {least}")
    return least


def _jitter(config: ModelConfig) -> float:
    noise = config.raw.get("router_jitter_noise")
    return 0.01 if noise is None else noise


def _two_experts(config: ModelConfig, norm: NormSpec) -> ExpertsSpec:
    experts = mixture({"weights": "mixer", "jitter": _jitter}, **_BLOCK)(config, norm)
    if (count := experts.routing.per_token) != 2:
        raise ModelError(f"model: config.json: num_experts_per_tok: {count}, where a 'phimoe' has 2")
    return experts


def _phimoe_rope(config: ModelConfig) -> dict[str, Any]:
    """What is rotated is multiplied by a number that config.json gives, for short contexts and for long ones."""
    rope = dict(config.rope)
    short, long = (rope.pop(f"{name}_mscale", None) for name in ("short", "long"))
    if short != long:
        raise ModelError(f"model: config.json: rope_scaling: short_mscale {short} and long_mscale {long} must be equal")
    return phi3_rope(replace(config, rope=rope if short is None else rope | {"attention_factor": short}))


def _chunks(config: ModelConfig) -> tuple[int | None, ...]:
    """By layer, where contexts are longer than a chunk."""
    longest = config.context or config.max_position
    return tuple(None if size is None or size >= longest else size for size in windows(config))


def _unit_norms(config: ModelConfig) -> list[str | None]:
    wanted = config.raw.get("use_qk_norm") is not False
    return ["unit" if wanted and rope is not None else None for rope in some_ropes(config)]


def _growths(config: ModelConfig) -> list[Growth | None]:
    """Of queries whose positions are left out."""
    raw = config.raw
    scale, tuned = raw.get("attn_scale"), raw.get("attn_temperature_tuning") not in (False, 0)
    growth = Growth(0.1 if scale is None else scale, raw.get("floor_scale") or 8192, first=1) if tuned else None
    return [growth if rope is None else None for rope in some_ropes(config)]


TABLE: Mapping[str, SpecOf] = {
    # Mixtral (Jiang et al., 2024): Mistral, with no sliding window but config.json's own.
    "mixtral": Family(attention={"window": given("sliding_window")}, experts=mixture(**_BLOCK)),
    # Qwen1.5's and Qwen2's (Qwen Team, 2024): experts in most layers, and a shared one with a gate of its own.
    "qwen2_moe": Family(like="qwen2", attention={"qkv_bias": unless("qkv_bias")}, experts=GATED_EXPERTS),
    # Qwen3's (Yang et al., 2025); config.json of Qwen3-VL does not say that weights are divided by their sum.
    "qwen3_moe": Family(like="qwen3", experts=mixture(NORMALIZED, size=expert_size)),
    "qwen3_vl_moe_text": Family(like="qwen3", experts=mixture(size=expert_size)),
    # Qwen3-Next (Qwen Team, 2025) and Qwen3.5's (2026).
    **dict.fromkeys(("qwen3_5_moe_text", "qwen3_next"), Family(like="qwen3_5_text", experts=GATED_EXPERTS)),
    # Mellum 2 (JetBrains, 2026): windows, and rotations of layers without one that are their own.
    "mellum": Family(
        like="qwen3_moe",
        attention={"window": windows, "rope": two_ropes(lambda config: 500_000.0, lambda config: 10_000.0)},
    ),
    # ERNIE 4.5 (Baidu, 2025): experts behind dense layers, chosen by weights that a bias corrects.
    "ernie4_5_moe": Family(
        like="ernie4_5",
        experts=mixture(
            {"added": _least_sum},
            size=expert_size,
            beside=shared(bias=flag("use_bias")),
            float_router=True,
            correction="moe_statics.e_score_correction_bias",
            correction_row=True,
        ),
    ),
    # FlexOLMo (Shi et al., 2025): OLMo 2 with experts in every layer.
    "flex_olmo": Family(like="olmo2", experts=mixture(NORMALIZED, input_norm=False, output_norm=True)),
    # OLMoE (Muennighoff et al., 2024): norms of whole queries and keys.
    "olmoe": Family(
        refused={"clip_qkv": "of an 'olmoe' is not supported"},
        attention={"qk_norm": "whole", **biased("attention_bias")},
        experts=mixture(NORMALIZED),
    ),
    # gpt-oss (OpenAI, 2025): a sink in every head, and in every second layer a sliding window.
    "gpt_oss": Family(
        attention={
            "window": windows,
            "qkv_bias": unless("attention_bias"),
            "out_bias": unless("attention_bias"),
            "sinks": True,
        },
        experts=mixture(router_bias=True, bias=True, clamp=_clamp, router="router"),
    ),
    # Granite's (IBM, 2024 and later): experts in every layer, and a shared MLP in some models.
    **dict.fromkeys(("granitemoe", "granitemoeshared"), Family(like="granite", experts=_GRANITE_EXPERTS)),
    "granitemoe_swa": Family(like="granite_swa", experts=_GRANITE_EXPERTS),
    # Hunyuan's (Tencent, 2025): experts in every layer, and a shared one.
    "hunyuan_v1_moe": Family(
        like="hunyuan_v1_dense", experts=mixture(beside=shared(always=True), float_router=True, router="gate.wg")
    ),
    # LFM2's (Liquid AI, 2025): experts behind dense layers, weighed by sigmoids.
    "lfm2_moe": Family(
        like="lfm2",
        experts=mixture(
            {
                "weights": "sigmoid",
                "added": 1e-6,
                "normalized": unless("norm_topk_prob"),
                "scale": given("routed_scaling_factor", 1.0),
            },
            size=expert_size,
            correction=lambda config: "expert_bias" if config.raw.get("use_expert_bias") is not False else None,
            name="feed_forward",
            **_NUMBERED,
        ),
    ),
    # Llama 4 (Meta, 2025): experts that are weighed where they read, beside one of every token; attention within chunks
    # and norms without weights, but for layers that leave positions out.
    "llama4_text": Family(
        attention={
            "rope": some_ropes,
            "window": _chunks,
            "chunked": lambda config: [size is not None for size in _chunks(config)],
            "qk_norm": _unit_norms,
            "growth": _growths,
            **biased("attention_bias"),
        },
        mlp={"intermediate_size": given("intermediate_size_mlp", 16384)},
        experts=where_sparse(
            mixture(
                {"weights": "sigmoid", "normalized": False, "inputs": True},
                beside=shared(),
                name="feed_forward",
                router="router",
            )
        ),
    ),
    # MiniMax-M2 (MiniMax, 2025): experts weighed by sigmoids; norms of whole queries and keys, which are
    # rotated in part.
    "minimax_m2": Family(
        attention={"qk_norm": "whole"},
        experts=mixture({"weights": "sigmoid"}, float_router=True, correction="e_score_correction_bias", **_BLOCK),
    ),
    # Phi-3.5-MoE (Abdin et al., 2024): LayerNorms, and two experts by SparseMixer in every layer.
    "phimoe": Family(
        like="phi3",
        norm=lambda config: NormSpec(config.norm_eps, centred=True, bias=True),
        attention={"rope": _phimoe_rope, **biased("attention_bias")},
        experts=_two_experts,
        decoder={"head_bias": flag("lm_head_bias")},
    ),
    # dots.llm1 (Huo et al., 2025): Qwen3's attention, and DeepSeek-V3's experts behind dense layers.
    "dots1": Family(like="qwen3", experts=GROUPED_EXPERTS),
    # GLM-4.5 to 4.7 (GLM Team, 2025) and Solar Open (Upstage, 2026): a partial rotation, and DeepSeek-V3's experts.
    **dict.fromkeys(
        ("glm4_moe", "solar_open"),
        Family(
            attention={
                "qk_norm": lambda config: "heads" if config.raw.get("use_qk_norm") else None,
                "qkv_bias": flag("attention_bias"),
            },
            experts=GROUPED_EXPERTS,
        ),
    ),
    # K-EXAONE (LG AI Research, 2025): EXAONE 4's attention behind norms, and DeepSeek-V3's experts.
    "exaone_moe": Family(
        like="exaone4",
        attention={"input_norm": True, "output_norm": False},
        mlp={"input_norm": True, "output_norm": False},
        experts=mixture(GROUPED, size=expert_size, beside=shared(), correction="e_score_correction_bias"),
    ),
}
