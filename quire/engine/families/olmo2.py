"""OLMo 2 (OLMo Team, 2024): norms of whole queries and keys; post-norms instead of pre-norms."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.engine.families.base import (
    LAYER_MODULES,
    POST_NORM_MODULES,
    POST_NORMS,
    DecoderFamily,
    GGUFFormat,
    GGUFMetadata,
    attention_bias_readers,
)


def _read_olmo2_gguf_fields(metadata: GGUFMetadata, fields: Mapping[str, Any]) -> dict[str, Any]:
    """OLMo 3's files have the same architecture name."""
    if window := metadata.integer("attention.sliding_window"):
        raise metadata.field_error("attention.sliding_window", f"{window}: OLMo 3 is served only from safetensors")
    return {}


OLMO2 = DecoderFamily(
    model_types=("olmo2",),
    defaults={"rms_norm_eps": 1e-05},
    attention={"qk_norm": "whole", **attention_bias_readers("attention_bias"), **POST_NORMS},
    mlp=POST_NORMS,
    gguf=GGUFFormat(
        architectures=("olmo2",),
        layer_modules={**LAYER_MODULES, **POST_NORM_MODULES},
        has_optional_window=True,
        read_fields=_read_olmo2_gguf_fields,
    ),
)
