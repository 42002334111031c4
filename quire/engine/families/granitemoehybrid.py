"""Granite 4 (IBM, 2025): Granite with state spaces in most layers; experts beside an MLP, or an MLP alone; with or
without positions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from quire.engine.architecture.decoder import DecoderSpec
from quire.engine.architecture.mlp import MLPSpec
from quire.engine.families.base.family import Family
from quire.engine.families.base.layer_types import hybrid_mixers_reader
from quire.engine.families.base.mamba2_fields import (
    MAMBA2_DEFAULTS,
    MAMBA2_PROJECTIONS,
    complete_hybrid_layer_types,
    complete_mamba2,
    mamba2_spec,
)
from quire.engine.families.base.model_config import ModelConfig
from quire.engine.families.base.moe_fields import shared_expert_width
from quire.engine.families.granite import GRANITE
from quire.engine.families.granitemoe import GRANITEMOE


def _complete(fields: dict[str, Any]) -> None:
    complete_hybrid_layer_types(fields, lambda layer: "linear_attention")
    complete_mamba2(fields)


def _build(config: ModelConfig) -> DecoderSpec:
    if config.raw.get("num_local_experts"):
        return GRANITEMOE.decoder_spec(config)
    dense_mlp = {"name": "shared_mlp", "intermediate_size": shared_expert_width(config.raw)}
    return GRANITE.decoder_spec(config).replace_sublayer_fields(MLPSpec, **dense_mlp)


GRANITEMOEHYBRID = Family(
    model_types=("granitemoehybrid",),
    field_names={"layers_block_type": "layer_types"},
    defaults={**MAMBA2_DEFAULTS, "num_local_experts": 8, "num_experts_per_tok": 2, "shared_intermediate_size": 1024},
    complete=_complete,
    other_layer_types=("linear_attention",),
    build=_build,
    attention={"rope": lambda config: config.rope if config.raw.get("position_embedding_type") == "rope" else None},
    mixers=hybrid_mixers_reader(mamba2_spec),
    weight_names=replace(
        GRANITEMOE.weight_names,
        layer_modules={**GRANITEMOE.weight_names.layer_modules, "mamba.in_proj": MAMBA2_PROJECTIONS},
    ),
)
