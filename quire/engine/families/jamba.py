"""Jamba (AI21 Labs, 2024): Mamba in most layers, attention without RoPE in the others, and in some layers experts with
unnormalized weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from quire.engine.architecture import NormSpec, SublayerSpec
from quire.engine.families.base import (
    FEED_FORWARD_MODULES,
    LAYER_MODULES,
    MAMBA_DEFAULTS,
    MAMBA_GGUF_MODULES,
    MAMBA_GGUF_TENSORS,
    MAMBA_MODULES,
    MAX_LAYERS,
    DecoderFamily,
    GGUFFormat,
    GGUFMetadata,
    ModelConfig,
    WeightNames,
    expert_modules,
    fill_layer_types,
    fill_mamba_sizes,
    hybrid_mixers_reader,
    mamba_spec,
    moe_reader,
    optional_moe_reader,
    read_hybrid_layer_types,
    read_mamba_fields,
)


def _fill_jamba_fields(fields: dict[str, Any]) -> None:
    fill_mamba_sizes(fields)
    has_attention, has_experts = (
        _periodic_layer_test(fields, "attn_layer"),
        _periodic_layer_test(fields, "expert_layer"),
    )
    fill_layer_types(fields, lambda layer: "full_attention" if has_attention(layer) else "linear_attention")
    layers, experts = fields.get("num_hidden_layers"), fields.get("num_experts")
    if not fields.get("mlp_layer_types") and isinstance(layers, int) and 1 <= layers <= MAX_LAYERS:
        is_moe = isinstance(experts, int) and experts > 1
        fields["mlp_layer_types"] = ["sparse" if is_moe and has_experts(layer) else "dense" for layer in range(layers)]


def _periodic_layer_test(fields: dict[str, Any], field_prefix: str) -> Callable[[int], bool]:
    period, offset = fields.get(f"{field_prefix}_period"), fields.get(f"{field_prefix}_offset")
    return lambda layer: isinstance(period, int) and period > 0 and layer % period == offset


def _mamba_spec(config: ModelConfig, norm: NormSpec) -> SublayerSpec:
    return mamba_spec(config, norm, inner_norm="learned", inner_eps=config.norm_eps)


def _read_jamba_gguf_fields(metadata: GGUFMetadata, fields: Mapping[str, Any]) -> dict[str, Any]:
    kinds = read_hybrid_layer_types(metadata)
    inner, hidden = metadata.integer("ssm.inner_size"), fields["hidden_size"]
    has_experts = [metadata.has_tensor(f"blk.{layer}.ffn_gate_inp.weight") for layer in range(len(kinds))]
    return read_mamba_fields(metadata) | {
        "mamba_expand": (inner // hidden or None) if inner and hidden else None,
        "layer_types": kinds,
        "mlp_layer_types": ["sparse" if each else "dense" for each in has_experts],
    }


JAMBA = DecoderFamily(
    model_types=("jamba",),
    defaults={
        **MAMBA_DEFAULTS,
        "num_key_value_heads": 8,
        "max_position_embeddings": 262_144,
        "num_experts": 16,
        "num_experts_per_tok": 2,
        "attn_layer_period": 8,
        "attn_layer_offset": 4,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
    },
    fill_derived_fields=_fill_jamba_fields,
    other_layer_types=("linear_attention",),
    attention={"rope": None},
    mixers=hybrid_mixers_reader(_mamba_spec),
    experts=optional_moe_reader(moe_reader({"is_normalized": False}, name="feed_forward", router="router")),
    weight_names=WeightNames(
        model_modules={"final_layernorm": "norm"},
        layer_modules={
            "pre_ff_layernorm": "post_attention_layernorm",
            **FEED_FORWARD_MODULES,
            **MAMBA_MODULES,
        },
    ),
    gguf=GGUFFormat(
        architectures=("jamba",),
        layer_modules={**LAYER_MODULES, **MAMBA_GGUF_MODULES, **expert_modules("feed_forward", router="router")},
        layer_tensors=MAMBA_GGUF_TENSORS,
        has_optional_experts=True,
        read_fields=_read_jamba_gguf_fields,
    ),
)
