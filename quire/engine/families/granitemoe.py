"""Granite MoE (IBM, 2024 and later): experts in every layer, a shared MLP in some models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.engine.families.base import (
    LAYER_MODULES,
    GGUFFormat,
    GGUFMetadata,
    StackedExperts,
    WeightNames,
    expert_modules,
    moe_reader,
    read_moe_fields,
    shared_expert_modules,
    shared_expert_reader,
)
from quire.engine.families.granite import GRANITE, read_gguf_multipliers
from quire.engine.families.granite_swa import GRANITE_SWA

GRANITE_MOE_READER = moe_reader(
    shared_expert=shared_expert_reader("shared_mlp"), name="block_sparse_moe", router="router.layer"
)

GRANITE_GGUF_MODULES = {
    **LAYER_MODULES,
    **expert_modules("block_sparse_moe", router="router.layer"),
    **shared_expert_modules("shared_mlp"),
}


def _read_granitemoe_gguf_fields(metadata: GGUFMetadata, fields: Mapping[str, Any]) -> dict[str, Any]:
    width = metadata.integer("expert_shared_feed_forward_length")
    experts = read_moe_fields(metadata, is_mlp_sized=True)
    return experts | read_gguf_multipliers(metadata, fields) | {"shared_intermediate_size": width}


GRANITEMOE = GRANITE.derive(
    "granitemoe",
    "granitemoeshared",
    experts=GRANITE_MOE_READER,
    weight_names=WeightNames(
        layer_modules={
            "shared_mlp.input_linear": ("shared_mlp.gate_proj", "shared_mlp.up_proj"),
            "shared_mlp.output_linear": "shared_mlp.down_proj",
            "block_sparse_moe.router": "block_sparse_moe.router.layer",
        },
        stacked_experts=StackedExperts(gate_up_halves=True),
    ),
    gguf=GGUFFormat(
        architectures=("granitemoe",),
        permutes_queries_and_keys=True,
        layer_modules=GRANITE_GGUF_MODULES,
        read_fields=_read_granitemoe_gguf_fields,
    ),
)
GRANITEMOE_SWA = GRANITE_SWA.derive(
    "granitemoe_swa",
    defaults={},
    missing_defaults={"sliding_window": 128},
    experts=GRANITE_MOE_READER,
    weight_names=GRANITEMOE.weight_names,
)
