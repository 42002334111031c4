"""gpt-oss (OpenAI, 2025): a sink in every head, and in every second layer a sliding window."""

from __future__ import annotations

from quire.engine.families.base.config_fields import default_true_reader
from quire.engine.families.base.family import Family
from quire.engine.families.base.layer_types import sliding_windows
from quire.engine.families.base.model_config import ModelConfig
from quire.engine.families.base.moe_fields import moe_reader
from quire.engine.families.base.weight_names import StackedExperts, WeightNames
from quire.kernels.parameters.activation import ClampedSwiGLU


def _clamped_swiglu(config: ModelConfig) -> ClampedSwiGLU:
    return ClampedSwiGLU(config.raw.get("swiglu_alpha") or 1.702, config.raw.get("swiglu_limit") or 7.0)


GPT_OSS = Family(
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
    experts=moe_reader(router_bias=True, bias=True, clamp=_clamped_swiglu, router="router"),
    weight_names=WeightNames(stacked_experts=StackedExperts()),
)
