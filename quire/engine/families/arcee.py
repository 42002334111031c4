"""Arcee's AFM (Arcee AI, 2025): Llama with an ungated squared-ReLU MLP."""

from __future__ import annotations

from quire.engine.families.base import GGUFFormat
from quire.engine.families.llama import LLAMA

ARCEE = LLAMA.derive(
    "arcee",
    defaults={"rms_norm_eps": 1e-05, "hidden_act": "relu2", "max_position_embeddings": 4096},
    mlp={"gated": False, "activation": "relu2"},
    gguf=GGUFFormat(
        architectures=("arcee",),
        permutes_queries_and_keys=True,
    ),
)
