"""Granite 3 and 4 (IBM, 2024): multipliers of embeddings, residuals, scores and logits. The residual stream is stored
divided by the residual multiplier. Norms cancel this factor if their eps is divided by its square.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.engine.architecture import NormSpec
from quire.engine.families.base import GGUFFormat, GGUFMetadata, ModelConfig, field_reader
from quire.engine.families.llama import LLAMA


def residual_multiplier(config: ModelConfig) -> float:
    return config.raw.get("residual_multiplier") or 1.0


def _embedding_scale(config: ModelConfig) -> float:
    return (config.raw.get("embedding_multiplier") or 1.0) / residual_multiplier(config)


_GGUF_MULTIPLIERS = {
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "attention_multiplier": "attention.scale",
    "logits_scaling": "logit_scale",
}


def read_gguf_multipliers(metadata: GGUFMetadata, fields: Mapping[str, Any]) -> dict[str, Any]:
    return {name: metadata.float(key) for name, key in _GGUF_MULTIPLIERS.items()}


GRANITE = LLAMA.derive(
    "granite",
    norm=lambda config: NormSpec(config.norm_eps / residual_multiplier(config) ** 2),
    attention={"scale": field_reader("attention_multiplier", 1.0)},
    decoder={
        "embedding_scale": _embedding_scale,
        "residual_multiplier": residual_multiplier,
        "logit_scale": lambda config: 1 / (config.raw.get("logits_scaling") or 1.0),
    },
    gguf=GGUFFormat(
        architectures=("granite",),
        permutes_queries_and_keys=True,
        read_fields=read_gguf_multipliers,
    ),
)
