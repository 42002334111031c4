"""LFM3 (Liquid AI, 2026): wider convolutions, sliding windows in some layers with their own RoPE, additional
post-norms, and per-head gates.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from quire.engine.architecture import NormSpec, ShortConvSpec
from quire.engine.common.errors import ModelError
from quire.engine.families.base import (
    SHORT_CONV_PROJECTIONS,
    DecoderFamily,
    ModelConfig,
    WeightNames,
    attention_bias_readers,
    attention_layer_values_reader,
    default_true_reader,
    fill_layer_types,
    hybrid_mixers_reader,
    ropes_by_window_reader,
    sliding_windows,
)
from quire.engine.families.lfm2 import short_conv_spec

_DEFAULT_LAYER_TYPES = ("sliding_attention", "conv", "full_attention", "conv")


def _fill_lfm3_fields(fields: dict[str, Any]) -> None:
    fill_layer_types(fields, lambda layer: _DEFAULT_LAYER_TYPES[layer % 4] if layer else "conv")


def _check_lfm3_config(config: ModelConfig) -> None:
    if config.raw.get("use_sandwich_norm") is False:
        raise ModelError(
            "model: config.json: use_sandwich_norm: an LFM3 without norms after attention and MLP is not served"
        )


def _short_conv_spec(config: ModelConfig, norm: NormSpec) -> ShortConvSpec:
    return replace(short_conv_spec(config, norm), output_norm=True)


LFM3 = DecoderFamily(
    model_types=("lfm3",),
    field_names={"norm_eps": "rms_norm_eps"},
    defaults={
        "tie_word_embeddings": True,
        "rms_norm_eps": 1e-05,
        "rope_theta": 1_000_000.0,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
            "full_attention": {"rope_type": "proportional", "rope_theta": 1_000_000.0, "partial_rotary_factor": 0.5},
        },
        "head_dim": 128,
        "conv_L_cache": 7,
        "sliding_window": 256,
        "max_position_embeddings": 128_000,
        "num_key_value_heads": 4,
    },
    has_partial_rotary=True,
    fill_derived_fields=_fill_lfm3_fields,
    check_config=_check_lfm3_config,
    other_layer_types=("conv",),
    attention={
        "qk_norm": "heads",
        "window": attention_layer_values_reader(sliding_windows, other_kinds=("conv",)),
        "rope": attention_layer_values_reader(
            ropes_by_window_reader(lambda config: 1_000_000.0, lambda config: 10_000.0), other_kinds=("conv",)
        ),
        "head_gates": default_true_reader("use_attention_gate"),
        "output_norm": True,
        **attention_bias_readers("attention_bias"),
    },
    mlp={"output_norm": True},
    mixers=hybrid_mixers_reader(_short_conv_spec, kinds=("conv",)),
    weight_names=WeightNames(
        model_modules={"embedding_norm": "norm"},
        layer_modules={
            "operator_norm": "input_layernorm",
            "post_operator_norm": "post_attention_layernorm",
            "ffn_norm": "pre_feedforward_layernorm",
            "post_ffn_norm": "post_feedforward_layernorm",
            "self_attn.g_proj": "self_attn.gate_proj",
            "conv.in_proj": SHORT_CONV_PROJECTIONS,
            "feed_forward.w1": "mlp.gate_proj",
            "feed_forward.w3": "mlp.up_proj",
            "feed_forward.w2": "mlp.down_proj",
        },
    ),
)
