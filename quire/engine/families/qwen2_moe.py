"""Qwen1.5 and Qwen2 MoE (Qwen Team, 2024): experts in most layers, and a gated shared expert."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.engine.families.base import (
    GATED_SHARED_MOE,
    LAYER_MODULES,
    GGUFFormat,
    GGUFMetadata,
    default_true_reader,
    expert_modules,
    read_moe_fields,
    shared_expert_modules,
)
from quire.engine.families.qwen2 import QWEN2

GATED_SHARED_GGUF_MODULES = {
    **LAYER_MODULES,
    **expert_modules(),
    **shared_expert_modules("mlp.shared_expert"),
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
}


def _read_qwen2_moe_gguf_fields(metadata: GGUFMetadata, fields: Mapping[str, Any]) -> dict[str, Any]:
    width = metadata.integer("expert_shared_feed_forward_length")
    return read_moe_fields(metadata) | {"shared_expert_intermediate_size": width}


QWEN2_MOE = QWEN2.derive(
    "qwen2_moe",
    attention={"qkv_bias": default_true_reader("qkv_bias")},
    experts=GATED_SHARED_MOE,
    gguf=GGUFFormat(
        architectures=("qwen2moe",),
        layer_modules=GATED_SHARED_GGUF_MODULES,
        read_fields=_read_qwen2_moe_gguf_fields,
    ),
)
