"""Helium 1 (Kyutai, 2025): Llama with interleaved RoPE."""

from __future__ import annotations

from quire.engine.families.base import WeightNames
from quire.engine.families.llama import LLAMA

HELIUM = LLAMA.derive(
    "helium",
    defaults={"rms_norm_eps": 1e-08, "head_dim": 128, "rope_theta": 100_000.0, "max_position_embeddings": 4096},
    attention={"out_bias": False},
    weight_names=WeightNames(has_interleaved_rope=True),
)
