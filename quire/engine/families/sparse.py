"""Families with mixtures of experts in an MLP's place."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from quire.engine.architecture.moe import MoELayerSpec
from quire.engine.architecture.norm import NormSpec
from quire.engine.architecture.rope import QueryScaling
from quire.engine.checkpoint.files import ModelConfig
from quire.engine.errors import ModelError
from quire.engine.families.config_fields import (
    SpecFields,
    attention_bias_readers,
    default_true_reader,
    field_reader,
    flag_reader,
)
from quire.engine.families.dense import interleaved_nope_ropes, phi3_rope, ropes_by_window_reader
from quire.engine.families.family import Family, FamilyEntry, sliding_windows
from quire.engine.families.moe_fields import (
    GATED_SHARED_MOE,
    GROUPED_MOE,
    GROUPED_ROUTING,
    NORMALIZED_ROUTING,
    expert_intermediate_size,
    moe_reader,
    optional_moe_reader,
    shared_expert_reader,
)
from quire.kernels.parameters.activation import ClampedSwiGLU

_W123_NAMES: SpecFields = {"gate": "w1", "up": "w3", "down": "w2"}
"""What Mixtral, and others after it, call an expert's linears,"""
_BLOCK_SPARSE_MOE: SpecFields = {"name": "block_sparse_moe", **_W123_NAMES}
"""and what these are in."""
_GRANITE_MOE = moe_reader(shared_expert=shared_expert_reader(), name="block_sparse_moe", router="router.layer")


def _clamped_swiglu(config: ModelConfig) -> ClampedSwiGLU:
    return ClampedSwiGLU(config.raw.get("swiglu_alpha") or 1.702, config.raw.get("swiglu_limit") or 7.0)


def _normalizer_eps(config: ModelConfig) -> float:
    """Of chosen weights, by which they are divided: what is as small as published models' may be added to it."""
    least = config.raw.get("moe_norm_min") or 0.0
    if least > 1e-6:
        raise ModelError(f"model: config.json: moe_norm_min: at most 1e-06 is served, got {least}")
    return least


def _router_jitter(config: ModelConfig) -> float:
    noise = config.raw.get("router_jitter_noise")
    return 0.01 if noise is None else noise


def _sparse_mixer_moe(config: ModelConfig, norm: NormSpec) -> MoELayerSpec:
    experts = moe_reader({"score_function": "mixer", "jitter": _router_jitter}, **_BLOCK_SPARSE_MOE)(config, norm)
    if (count := experts.routing.top_k) != 2:
        raise ModelError(f"model: config.json: num_experts_per_tok: {count}, where a 'phimoe' has 2")
    return experts


def _phimoe_rope(config: ModelConfig) -> dict[str, Any]:
    """What is rotated is multiplied by a number that config.json gives, for short contexts and for long ones."""
    rope = dict(config.rope)
    short, long = (rope.pop(f"{name}_mscale", None) for name in ("short", "long"))
    if short != long:
        raise ModelError(f"model: config.json: rope_scaling: short_mscale {short} and long_mscale {long} must be equal")
    return phi3_rope(replace(config, rope=rope if short is None else rope | {"attention_factor": short}))


def _attention_chunk_sizes(config: ModelConfig) -> tuple[int | None, ...]:
    """By layer, where contexts are longer than a chunk."""
    longest = config.context or config.max_position
    return tuple(None if size is None or size >= longest else size for size in sliding_windows(config))


def _llama4_qk_norms(config: ModelConfig) -> list[str | None]:
    wanted = config.raw.get("use_qk_norm") is not False
    return ["unit" if wanted and rope is not None else None for rope in interleaved_nope_ropes(config)]


def _query_scalings(config: ModelConfig) -> list[QueryScaling | None]:
    """Of queries whose positions are left out."""
    raw = config.raw
    scale, tuned = raw.get("attn_scale"), raw.get("attn_temperature_tuning") not in (False, 0)
    growth = (
        QueryScaling(0.1 if scale is None else scale, raw.get("floor_scale") or 8192, first_position=1)
        if tuned
        else None
    )
    return [growth if rope is None else None for rope in interleaved_nope_ropes(config)]


TABLE: Mapping[str, FamilyEntry] = {
    # Mixtral (Jiang et al., 2024): Mistral, with no sliding window but config.json's own.
    "mixtral": Family(attention={"window": field_reader("sliding_window")}, experts=moe_reader(**_BLOCK_SPARSE_MOE)),
    # Qwen1.5's and Qwen2's (Qwen Team, 2024): experts in most layers, and a shared one with a gate of its own.
    "qwen2_moe": Family(
        base="qwen2", attention={"qkv_bias": default_true_reader("qkv_bias")}, experts=GATED_SHARED_MOE
    ),
    # Qwen3's (Yang et al., 2025); config.json of Qwen3-VL does not say that weights are divided by their sum.
    "qwen3_moe": Family(base="qwen3", experts=moe_reader(NORMALIZED_ROUTING, size=expert_intermediate_size)),
    "qwen3_vl_moe_text": Family(base="qwen3", experts=moe_reader(size=expert_intermediate_size)),
    # Qwen3-Next (Qwen Team, 2025) and Qwen3.5's (2026).
    **dict.fromkeys(("qwen3_5_moe_text", "qwen3_next"), Family(base="qwen3_5_text", experts=GATED_SHARED_MOE)),
    # Mellum 2 (JetBrains, 2026): windows, and rotations of layers without one that are their own.
    "mellum": Family(
        base="qwen3_moe",
        attention={
            "window": sliding_windows,
            "rope": ropes_by_window_reader(lambda config: 500_000.0, lambda config: 10_000.0),
        },
    ),
    # ERNIE 4.5 (Baidu, 2025): experts behind dense layers, chosen by weights that a bias corrects.
    "ernie4_5_moe": Family(
        base="ernie4_5",
        experts=moe_reader(
            {"normalizer_eps": _normalizer_eps},
            size=expert_intermediate_size,
            shared_expert=shared_expert_reader(bias=flag_reader("use_bias")),
            float_router=True,
            correction="moe_statics.e_score_correction_bias",
            correction_row=True,
        ),
    ),
    # FlexOLMo (Shi et al., 2025): OLMo 2 with experts in every layer.
    "flex_olmo": Family(base="olmo2", experts=moe_reader(NORMALIZED_ROUTING, input_norm=False, output_norm=True)),
    # OLMoE (Muennighoff et al., 2024): norms of whole queries and keys.
    "olmoe": Family(
        unsupported_fields={"clip_qkv": "of an 'olmoe' is not supported"},
        attention={"qk_norm": "whole", **attention_bias_readers("attention_bias")},
        experts=moe_reader(NORMALIZED_ROUTING),
    ),
    # gpt-oss (OpenAI, 2025): a sink in every head, and in every second layer a sliding window.
    "gpt_oss": Family(
        attention={
            "window": sliding_windows,
            "qkv_bias": default_true_reader("attention_bias"),
            "out_bias": default_true_reader("attention_bias"),
            "sinks": True,
        },
        experts=moe_reader(router_bias=True, bias=True, clamp=_clamped_swiglu, router="router"),
    ),
    # Granite's (IBM, 2024 and later): experts in every layer, and a shared MLP in some models.
    **dict.fromkeys(("granitemoe", "granitemoeshared"), Family(base="granite", experts=_GRANITE_MOE)),
    "granitemoe_swa": Family(base="granite_swa", experts=_GRANITE_MOE),
    # Hunyuan's (Tencent, 2025): experts in every layer, and a shared one.
    "hunyuan_v1_moe": Family(
        base="hunyuan_v1_dense",
        experts=moe_reader(shared_expert=shared_expert_reader(is_required=True), float_router=True, router="gate.wg"),
    ),
    # LFM2's (Liquid AI, 2025): experts behind dense layers, weighed by sigmoids.
    "lfm2_moe": Family(
        base="lfm2",
        experts=moe_reader(
            {
                "score_function": "sigmoid",
                "normalizer_eps": 1e-6,
                "is_normalized": default_true_reader("norm_topk_prob"),
                "scale": field_reader("routed_scaling_factor", 1.0),
            },
            size=expert_intermediate_size,
            correction=lambda config: "expert_bias" if config.raw.get("use_expert_bias") is not False else None,
            name="feed_forward",
            **_W123_NAMES,
        ),
    ),
    # Llama 4 (Meta, 2025): experts that are weighed where they read, beside one of every token; attention within chunks
    # and norms without weights, but for layers that leave positions out.
    "llama4_text": Family(
        attention={
            "rope": interleaved_nope_ropes,
            "window": _attention_chunk_sizes,
            "chunked": lambda config: [size is not None for size in _attention_chunk_sizes(config)],
            "qk_norm": _llama4_qk_norms,
            "query_scaling": _query_scalings,
            **attention_bias_readers("attention_bias"),
        },
        mlp={"intermediate_size": field_reader("intermediate_size_mlp", 16384)},
        experts=optional_moe_reader(
            moe_reader(
                {"score_function": "sigmoid", "is_normalized": False, "weights_inputs": True},
                shared_expert=shared_expert_reader(),
                name="feed_forward",
                router="router",
            )
        ),
    ),
    # MiniMax-M2 (MiniMax, 2025): experts weighed by sigmoids; norms of whole queries and keys, which are
    # rotated in part.
    "minimax_m2": Family(
        attention={"qk_norm": "whole"},
        experts=moe_reader(
            {"score_function": "sigmoid"}, float_router=True, correction="e_score_correction_bias", **_BLOCK_SPARSE_MOE
        ),
    ),
    # Phi-3.5-MoE (Abdin et al., 2024): LayerNorms, and two experts by SparseMixer in every layer.
    "phimoe": Family(
        base="phi3",
        norm=lambda config: NormSpec(config.norm_eps, is_layer_norm=True, bias=True),
        attention={"rope": _phimoe_rope, **attention_bias_readers("attention_bias")},
        experts=_sparse_mixer_moe,
        decoder={"head_bias": flag_reader("lm_head_bias")},
    ),
    # dots.llm1 (Huo et al., 2025): Qwen3's attention, and DeepSeek-V3's experts behind dense layers.
    "dots1": Family(base="qwen3", experts=GROUPED_MOE),
    # GLM-4.5 to 4.7 (GLM Team, 2025) and Solar Open (Upstage, 2026): a partial rotation, and DeepSeek-V3's experts.
    **dict.fromkeys(
        ("glm4_moe", "solar_open"),
        Family(
            attention={
                "qk_norm": lambda config: "heads" if config.raw.get("use_qk_norm") else None,
                "qkv_bias": flag_reader("attention_bias"),
            },
            experts=GROUPED_MOE,
        ),
    ),
    # K-EXAONE (LG AI Research, 2025): EXAONE 4's attention behind norms, and DeepSeek-V3's experts.
    "exaone_moe": Family(
        base="exaone4",
        attention={"input_norm": True, "output_norm": False},
        mlp={"input_norm": True, "output_norm": False},
        experts=moe_reader(
            GROUPED_ROUTING,
            size=expert_intermediate_size,
            shared_expert=shared_expert_reader(),
            correction="e_score_correction_bias",
        ),
    ),
}
