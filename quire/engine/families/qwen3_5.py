"""Qwen3.5's text models (Qwen Team, 2026), dense and MoE: gated delta nets in most layers, gated attention in the
others; norm weights stored as offsets from 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.engine.architecture import DeltaNetSpec, NormSpec, SublayerSpec
from quire.engine.common.errors import ModelError
from quire.engine.families.base import (
    GATED_DELTA_NET_MODULES,
    GATED_SHARED_MOE,
    LAYER_MODULES,
    DecoderFamily,
    GGUFFormat,
    GGUFMetadata,
    ModelConfig,
    StackedExperts,
    WeightNames,
    attention_bias_readers,
    fill_layer_types,
    hybrid_mixers_reader,
    mrope_axes_reader,
)
from quire.engine.families.qwen2_moe import GATED_SHARED_GGUF_MODULES


def delta_net_spec(config: ModelConfig, norm: NormSpec) -> SublayerSpec:
    raw = config.raw
    key_heads, heads = raw.get("linear_num_key_heads") or 16, raw.get("linear_num_value_heads") or 32
    key, value = raw.get("linear_key_head_dim") or 128, raw.get("linear_value_head_dim") or 128
    if heads % key_heads:
        raise ModelError(f"model: config.json: linear_num_key_heads: {key_heads} do not divide {heads} value heads")
    if key % 2:
        raise ModelError(f"model: config.json: linear_key_head_dim: expected an even number, got {key}")
    if value % 16:
        raise ModelError(f"model: config.json: linear_value_head_dim: expected a multiple of 16, got {value}")
    return DeltaNetSpec(heads, key, value, raw.get("linear_conv_kernel_dim") or 4, norm, key_heads)


def _fill_qwen3_5_fields(fields: dict[str, Any]) -> None:
    every = fields.get("full_attention_interval") or 4
    if isinstance(every, int):
        fill_layer_types(fields, lambda layer: "linear_attention" if (layer + 1) % every else "full_attention")


DELTA_NET_GGUF_MODULES = {
    **LAYER_MODULES,
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_ba": "linear_attn.in_proj_ba",
    "ssm_out": "linear_attn.out_proj",
    "ssm_norm": "linear_attn.norm",
    "ssm_conv1d": "linear_attn.conv1d",
    "post_attention_norm": "post_attention_layernorm",
}
DELTA_NET_GGUF_TENSORS = {"ssm_a": "linear_attn.A_log", "ssm_dt.bias": "linear_attn.dt_bias"}


def _read_qwen3_5_gguf_fields(metadata: GGUFMetadata, fields: Mapping[str, Any]) -> dict[str, Any]:
    heads, inner = metadata.integer("ssm.time_step_rank"), metadata.integer("ssm.inner_size")
    return {
        "full_attention_interval": metadata.integer("full_attention_interval") or 4,
        "linear_conv_kernel_dim": metadata.integer("ssm.conv_kernel"),
        "linear_key_head_dim": metadata.integer("ssm.state_size"),
        "linear_num_key_heads": metadata.integer("ssm.group_count"),
        "linear_num_value_heads": heads,
        "linear_value_head_dim": inner // heads if inner and heads else None,
        "num_nextn_predict_layers": metadata.integer("nextn_predict_layers"),
    }


def read_qwen3_5_moe_gguf_fields(metadata: GGUFMetadata, fields: Mapping[str, Any]) -> dict[str, Any]:
    return _read_qwen3_5_gguf_fields(metadata, fields) | {
        "moe_intermediate_size": metadata.integer("expert_feed_forward_length"),
        "shared_expert_intermediate_size": metadata.integer("expert_shared_feed_forward_length"),
        "norm_topk_prob": True,
    }


QWEN3_5 = DecoderFamily(
    model_types=("qwen3_5_text",),
    defaults={"head_dim": 256, "partial_rotary_factor": 0.25, "max_position_embeddings": 32768},
    missing_defaults={"num_key_value_heads": 4},
    has_partial_rotary=True,
    fill_derived_fields=_fill_qwen3_5_fields,
    other_layer_types=("linear_attention",),
    norm=lambda config: NormSpec(config.norm_eps, weight_offset=1.0),
    attention={
        "qk_norm": "heads",
        "has_output_gate": True,
        "mrope_axes": mrope_axes_reader((11, 11, 10)),
        **attention_bias_readers("attention_bias"),
    },
    mixers=hybrid_mixers_reader(delta_net_spec),
    weight_names=WeightNames(layer_modules=GATED_DELTA_NET_MODULES),
    gguf=GGUFFormat(
        architectures=("qwen35",),
        layer_modules=DELTA_NET_GGUF_MODULES,
        layer_tensors=DELTA_NET_GGUF_TENSORS,
        tiles_value_heads=True,
        read_fields=_read_qwen3_5_gguf_fields,
    ),
)
QWEN3_5_MOE = QWEN3_5.derive(
    "qwen3_5_moe_text",
    defaults={**QWEN3_5.defaults, "norm_topk_prob": True, "intermediate_size": 512},
    missing_defaults={"num_key_value_heads": 2},
    experts=GATED_SHARED_MOE,
    weight_names=WeightNames(
        layer_modules=GATED_DELTA_NET_MODULES, stacked_experts=StackedExperts(gate_up_halves=True)
    ),
    gguf=GGUFFormat(
        architectures=("qwen35moe",),
        layer_modules={**GATED_SHARED_GGUF_MODULES, **DELTA_NET_GGUF_MODULES},
        layer_tensors=DELTA_NET_GGUF_TENSORS,
        tiles_value_heads=True,
        read_fields=read_qwen3_5_moe_gguf_fields,
    ),
)
