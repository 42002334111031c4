"""Qwen3-Next (Qwen Team, 2025): Qwen3.5's layers with delta net projections fused per key head, text only."""

from __future__ import annotations

from quire.engine.families.base import (
    GATED_QUERY_MODULES,
    GATED_SHARED_MOE,
    GGUFFormat,
    WeightNames,
    delta_net_projections,
)
from quire.engine.families.qwen2_moe import GATED_SHARED_GGUF_MODULES
from quire.engine.families.qwen3_5 import (
    DELTA_NET_GGUF_MODULES,
    DELTA_NET_GGUF_TENSORS,
    QWEN3_5,
    read_qwen3_5_moe_gguf_fields,
)

QWEN3_NEXT = QWEN3_5.derive(
    "qwen3_next",
    defaults={**QWEN3_5.defaults, "norm_topk_prob": True},
    missing_defaults={"num_key_value_heads": 2},
    attention={"mrope_axes": None},
    experts=GATED_SHARED_MOE,
    weight_names=WeightNames(
        layer_modules={
            **GATED_QUERY_MODULES,
            "linear_attn.in_proj_qkvz": delta_net_projections("qkvz"),
            "linear_attn.in_proj_ba": delta_net_projections("ba"),
        },
        is_fused_by_kv_head=True,
    ),
    gguf=GGUFFormat(
        architectures=("qwen3next",),
        layer_modules={**GATED_SHARED_GGUF_MODULES, **DELTA_NET_GGUF_MODULES},
        layer_tensors=DELTA_NET_GGUF_TENSORS,
        read_fields=read_qwen3_5_moe_gguf_fields,
    ),
)
