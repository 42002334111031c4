"""Qwen1.5's and Qwen2's mixtures (Qwen Team, 2024): experts in most layers, and a shared one with a gate of its own."""

from __future__ import annotations

from quire.engine.families.base.config_fields import default_true_reader
from quire.engine.families.base.moe_fields import GATED_SHARED_MOE
from quire.engine.families.qwen2 import QWEN2

QWEN2_MOE = QWEN2.derive(
    "qwen2_moe",
    attention={"qkv_bias": default_true_reader("qkv_bias")},
    experts=GATED_SHARED_MOE,
)
