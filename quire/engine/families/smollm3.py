"""SmolLM3 (Bakouch et al., 2025): Llama without RoPE in one of every few layers."""

from __future__ import annotations

from quire.engine.families.base import GGUFFormat, periodic_nope_ropes, upper_sliding_windows
from quire.engine.families.llama import LLAMA

SMOLLM3 = LLAMA.derive(
    "smollm3",
    defaults={"tie_word_embeddings": True, "rope_theta": 2_000_000.0, "max_position_embeddings": 32768},
    missing_defaults={"num_key_value_heads": 4, "use_sliding_window": False},
    attention={"window": upper_sliding_windows, "rope": periodic_nope_ropes},
    gguf=GGUFFormat(
        architectures=("smollm3",),
        permutes_queries_and_keys=True,
    ),
)
