"""Command R7B and A (Cohere, 2025): sliding windows in three of four layers, no RoPE in the others."""

from __future__ import annotations

from quire.engine.families.base import GGUFFormat, sliding_windows, window_only_ropes
from quire.engine.families.cohere import COHERE, read_cohere_gguf_fields

COHERE2 = COHERE.derive(
    "cohere2",
    defaults={
        "tie_word_embeddings": True,
        "rms_norm_eps": 1e-05,
        "logit_scale": 0.0625,
        "sliding_window_pattern": 4,
        "max_position_embeddings": 8192,
    },
    missing_defaults={"sliding_window": 4096},
    attention={"window": sliding_windows, "rope": window_only_ropes},
    gguf=GGUFFormat(
        architectures=("cohere2",),
        has_optional_window=True,
        read_fields=read_cohere_gguf_fields,
    ),
)
