"""Qwen2 and Qwen2.5 (Yang et al., 2024): some models have sliding windows in upper layers."""

from __future__ import annotations

from quire.engine.families.base import DecoderFamily, GGUFFormat, upper_sliding_windows

QWEN2 = DecoderFamily(
    model_types=("qwen2",),
    defaults={"max_position_embeddings": 32768},
    missing_defaults={"use_sliding_window": False},
    attention={"window": upper_sliding_windows, "qkv_bias": True},
    gguf=GGUFFormat(
        architectures=("qwen2",),
    ),
)
