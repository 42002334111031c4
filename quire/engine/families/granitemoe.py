"""Granite's mixtures (IBM, 2024 and later): experts in every layer, and a shared MLP in some models."""

from __future__ import annotations

from quire.engine.families.base.moe_fields import moe_reader, shared_expert_reader
from quire.engine.families.base.weight_names import StackedExperts, WeightNames
from quire.engine.families.granite import GRANITE
from quire.engine.families.granite_swa import GRANITE_SWA

GRANITE_EXPERTS = moe_reader(
    shared_expert=shared_expert_reader("shared_mlp"), name="block_sparse_moe", router="router.layer"
)
GRANITEMOE = GRANITE.derive(
    "granitemoe",
    "granitemoeshared",
    experts=GRANITE_EXPERTS,
    weight_names=WeightNames(
        layer_modules={
            "shared_mlp.input_linear": ("shared_mlp.gate_proj", "shared_mlp.up_proj"),
            "shared_mlp.output_linear": "shared_mlp.down_proj",
            "block_sparse_moe.router": "block_sparse_moe.router.layer",
        },
        stacked_experts=StackedExperts(gate_up_halves=True),
    ),
)
GRANITEMOE_SWA = GRANITE_SWA.derive(
    "granitemoe_swa",
    defaults={},
    missing_defaults={"sliding_window": 128},
    experts=GRANITE_EXPERTS,
    weight_names=GRANITEMOE.weight_names,
)
