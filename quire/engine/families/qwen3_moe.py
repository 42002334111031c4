"""Qwen3 MoE (Yang et al., 2025)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.engine.families.base import (
    LAYER_MODULES,
    NORMALIZED_ROUTING,
    GGUFFormat,
    GGUFMetadata,
    expert_intermediate_size,
    expert_modules,
    moe_reader,
)
from quire.engine.families.qwen3 import QWEN3


def _read_qwen3_moe_gguf_fields(metadata: GGUFMetadata, fields: Mapping[str, Any]) -> dict[str, Any]:
    return {"moe_intermediate_size": metadata.integer("expert_feed_forward_length"), "norm_topk_prob": True}


QWEN3_MOE = QWEN3.derive(
    "qwen3_moe",
    missing_defaults={"num_key_value_heads": 4, "use_sliding_window": False},
    experts=moe_reader(NORMALIZED_ROUTING, size=expert_intermediate_size),
    gguf=GGUFFormat(
        architectures=("qwen3moe",),
        layer_modules={**LAYER_MODULES, **expert_modules()},
        read_fields=_read_qwen3_moe_gguf_fields,
    ),
)
