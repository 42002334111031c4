"""dots.llm1 (Huo et al., 2025): Qwen3's attention, and DeepSeek-V3's experts after dense layers."""

from __future__ import annotations

from quire.engine.families.base import (
    GROUPED_MOE,
    LAYER_MODULES,
    GGUFFormat,
    expert_modules,
    read_moe_fields,
    shared_expert_modules,
)
from quire.engine.families.qwen3 import QWEN3

DOTS1 = QWEN3.derive(
    "dots1",
    field_names={"n_routed_experts": "num_local_experts", "num_mtp_layers": "num_nextn_predict_layers"},
    defaults={},
    missing_defaults={"sliding_window": 4096},
    experts=GROUPED_MOE,
    gguf=GGUFFormat(
        architectures=("dots1",),
        layer_modules={**LAYER_MODULES, **expert_modules(), **shared_expert_modules()},
        read_fields=read_moe_fields,
    ),
)
