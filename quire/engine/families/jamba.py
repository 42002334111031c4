"""Jamba (AI21 Labs, 2024): selective scans in most layers, attention without positions in the others, and experts in
some MLPs' place, whose weights are not divided by their sum."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from quire.engine.architecture.norm import NormSpec
from quire.engine.architecture.sublayer import SublayerSpec
from quire.engine.families.base.family import Family
from quire.engine.families.base.layer_types import complete_layer_types, hybrid_mixers_reader
from quire.engine.families.base.mamba_fields import MAMBA_DEFAULTS, MAMBA_MODULES, complete_mamba, mamba_spec
from quire.engine.families.base.model_config import ModelConfig
from quire.engine.families.base.moe_fields import moe_reader, optional_moe_reader
from quire.engine.families.base.schema.config_schema import MAX_LAYERS
from quire.engine.families.base.weight_names import FEED_FORWARD_MLP, WeightNames


def _complete(fields: dict[str, Any]) -> None:
    complete_mamba(fields)
    has_attention, has_experts = _is_periodic(fields, "attn_layer"), _is_periodic(fields, "expert_layer")
    complete_layer_types(fields, lambda layer: "full_attention" if has_attention(layer) else "linear_attention")
    layers, experts = fields.get("num_hidden_layers"), fields.get("num_experts")
    if not fields.get("mlp_layer_types") and isinstance(layers, int) and 1 <= layers <= MAX_LAYERS:
        is_moe = isinstance(experts, int) and experts > 1
        fields["mlp_layer_types"] = ["sparse" if is_moe and has_experts(layer) else "dense" for layer in range(layers)]


def _is_periodic(fields: dict[str, Any], what: str) -> Callable[[int], bool]:
    """Whether a layer has something: one of so many, and which of them."""
    period, offset = fields.get(f"{what}_period"), fields.get(f"{what}_offset")
    return lambda layer: isinstance(period, int) and period > 0 and layer % period == offset


def _mamba_spec(config: ModelConfig, norm: NormSpec) -> SublayerSpec:
    return mamba_spec(config, norm, inner_norm="learned", inner_eps=config.norm_eps)


JAMBA = Family(
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
    complete=_complete,
    other_layer_types=("linear_attention",),
    attention={"rope": None},
    mixers=hybrid_mixers_reader(_mamba_spec),
    experts=optional_moe_reader(moe_reader({"is_normalized": False}, name="feed_forward", router="router")),
    weight_names=WeightNames(
        model_modules={"final_layernorm": "norm"},
        layer_modules={
            "pre_ff_layernorm": "post_attention_layernorm",
            **FEED_FORWARD_MLP,
            **MAMBA_MODULES,
        },
    ),
)
