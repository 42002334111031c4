"""Qwen3's mixtures of experts (Yang et al., 2025)."""

from __future__ import annotations

from quire.engine.families.base.moe_fields import NORMALIZED_ROUTING, expert_intermediate_size, moe_reader
from quire.engine.families.qwen3 import QWEN3

QWEN3_MOE = QWEN3.derive(
    "qwen3_moe",
    missing_defaults={"num_key_value_heads": 4, "use_sliding_window": False},
    experts=moe_reader(NORMALIZED_ROUTING, size=expert_intermediate_size),
)
