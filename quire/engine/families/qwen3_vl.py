"""Text models of Qwen3-VL, dense and MoE (Qwen Team, 2025): Qwen3 with mRoPE."""

from __future__ import annotations

from quire.engine.families.base import (
    StackedExperts,
    WeightNames,
    expert_intermediate_size,
    moe_reader,
    mrope_axes_reader,
)
from quire.engine.families.qwen3 import QWEN3

MROPE_AXES = mrope_axes_reader((24, 20, 20))
QWEN3_VL = QWEN3.derive(
    "qwen3_vl_text",
    defaults={"tie_word_embeddings": True, "rope_theta": 500_000.0, "max_position_embeddings": 128_000},
    attention={"mrope_axes": MROPE_AXES},
)
# config.json does not mention that expert weights are normalized.
QWEN3_VL_MOE = QWEN3_VL.derive(
    "qwen3_vl_moe_text",
    experts=moe_reader(size=expert_intermediate_size),
    weight_names=WeightNames(stacked_experts=StackedExperts(gate_up_halves=True, maybe_transposed=True)),
)
