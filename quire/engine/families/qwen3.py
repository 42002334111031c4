"""Qwen3, dense (Yang et al., 2025): per-head QK norms, no biases by default."""

from __future__ import annotations

from quire.engine.families.base import GGUFFormat, attention_bias_readers
from quire.engine.families.qwen2 import QWEN2

QWEN3 = QWEN2.derive(
    "qwen3",
    attention={"qk_norm": "heads", **attention_bias_readers("attention_bias")},
    gguf=GGUFFormat(
        architectures=("qwen3",),
    ),
)
