"""Mellum 2 (JetBrains, 2026): Qwen3's experts, sliding windows, and separate RoPE of full-attention layers."""

from __future__ import annotations

from typing import Any

from quire.engine.families.base import fill_layer_types, ropes_by_window_reader, sliding_windows
from quire.engine.families.qwen3_moe import QWEN3_MOE


def _fill_mellum_fields(fields: dict[str, Any]) -> None:
    fill_layer_types(fields, lambda layer: "full_attention")


MELLUM = QWEN3_MOE.derive(
    "mellum",
    field_names={"num_mtp_layers": "num_nextn_predict_layers"},
    defaults={"head_dim": 128, "norm_topk_prob": True, "sliding_window": 1024, "max_position_embeddings": 131_072},
    missing_defaults={"num_key_value_heads": 4},
    has_partial_rotary=True,
    fill_derived_fields=_fill_mellum_fields,
    attention={
        "window": sliding_windows,
        "rope": ropes_by_window_reader(lambda config: 500_000.0, lambda config: 10_000.0),
    },
)
