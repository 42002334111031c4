"""Text models of Qwen2-VL and Qwen2.5-VL (Wang et al., 2024; Bai et al., 2025): Qwen2 with mRoPE."""

from __future__ import annotations

from quire.engine.families.base import mrope_axes_reader
from quire.engine.families.qwen2 import QWEN2

QWEN2_VL = QWEN2.derive(
    "qwen2_vl_text",
    defaults={"rms_norm_eps": 1e-05, "rope_theta": 1_000_000.0, "max_position_embeddings": 32768},
    missing_defaults={"num_key_value_heads": 8, "use_sliding_window": False},
    attention={"mrope_axes": mrope_axes_reader(())},
)
QWEN2_5_VL = QWEN2_VL.derive(
    "qwen2_5_vl_text",
)
