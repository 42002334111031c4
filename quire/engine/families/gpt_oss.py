"""gpt-oss (OpenAI, 2025): attention sinks, and a sliding window in every other layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.engine.families.base import (
    LAYER_MODULES,
    DecoderFamily,
    GGUFFormat,
    GGUFMetadata,
    ModelConfig,
    StackedExperts,
    WeightNames,
    default_true_reader,
    expert_modules,
    moe_reader,
    sliding_windows,
)
from quire.kernels.parameters.activation import ClampedSwiGLU


def _read_clamped_swiglu(config: ModelConfig) -> ClampedSwiGLU:
    return ClampedSwiGLU(config.raw.get("swiglu_alpha") or 1.702, config.raw.get("swiglu_limit") or 7.0)


def _read_gpt_oss_gguf_fields(metadata: GGUFMetadata, fields: Mapping[str, Any]) -> dict[str, Any]:
    own: dict[str, Any] = {
        "intermediate_size": metadata.integer("expert_feed_forward_length"),
        "sliding_window": metadata.integer("attention.sliding_window"),
    }
    if fields["rope_parameters"]["rope_type"] == "yarn":
        # YaRN's bounds are not rounded, which GGUF files do not say.
        own["rope_parameters"] = fields["rope_parameters"] | {"truncate": False}
    return own


GPT_OSS = DecoderFamily(
    model_types=("gpt_oss",),
    defaults={
        "rms_norm_eps": 1e-05,
        "head_dim": 64,
        "rope_theta": 150_000.0,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 150_000.0,
            "factor": 32.0,
            "original_max_position_embeddings": 4096,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
        },
        "sliding_window_pattern": 2,
        "max_position_embeddings": 131_072,
    },
    missing_defaults={"num_key_value_heads": 8, "sliding_window": 128},
    attention={
        "window": sliding_windows,
        "qkv_bias": default_true_reader("attention_bias"),
        "out_bias": default_true_reader("attention_bias"),
        "sinks": True,
    },
    experts=moe_reader(router_bias=True, bias=True, clamp=_read_clamped_swiglu, router="router"),
    weight_names=WeightNames(stacked_experts=StackedExperts()),
    gguf=GGUFFormat(
        architectures=("gpt-oss",),
        layer_modules={
            **LAYER_MODULES,
            **expert_modules(router="router"),
            "post_attention_norm": "post_attention_layernorm",
        },
        read_fields=_read_gpt_oss_gguf_fields,
    ),
)
