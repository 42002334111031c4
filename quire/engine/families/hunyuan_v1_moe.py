"""Hunyuan MoE (Tencent, 2025): experts and a shared expert in every layer."""

from __future__ import annotations

from typing import Any

from quire.engine.families.base import (
    LAYER_MODULES,
    GGUFFormat,
    expert_modules,
    mlp_intermediate_size,
    moe_reader,
    read_mlp_sized_moe_fields,
    shared_expert_modules,
    shared_expert_reader,
)
from quire.engine.families.hunyuan_v1_dense import HUNYUAN_V1_DENSE

_PER_LAYER_FIELDS = ("num_experts", "num_experts_per_tok", "moe_intermediate_size")


def _fill_hunyuan_v1_moe_fields(fields: dict[str, Any]) -> None:
    for name in _PER_LAYER_FIELDS:
        value = fields.get(name)
        if isinstance(value, list) and value and all(each == value[0] for each in value):
            fields[name] = value[0]


HUNYUAN_V1_MOE = HUNYUAN_V1_DENSE.derive(
    "hunyuan_v1_moe",
    field_names={"moe_topk": "num_experts_per_tok"},
    fill_derived_fields=_fill_hunyuan_v1_moe_fields,
    experts=moe_reader(
        shared_expert=shared_expert_reader("mlp.shared_mlp", size=mlp_intermediate_size, is_required=True),
        float_router=True,
        router="gate.wg",
    ),
    gguf=GGUFFormat(
        architectures=("hunyuan-moe",),
        layer_modules={**LAYER_MODULES, **expert_modules(router="gate.wg"), **shared_expert_modules("mlp.shared_mlp")},
        read_fields=read_mlp_sized_moe_fields,
    ),
)
