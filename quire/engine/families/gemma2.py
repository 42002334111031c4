"""Gemma 2 (Gemma Team, 2024): additional post-norms, softcapped scores and logits, a sliding window in every other
layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.engine.families.base import LAYER_MODULES, POST_NORM_MODULES, GGUFFormat, GGUFMetadata, sliding_windows
from quire.engine.families.gemma import GEMMA

_LARGEST_MODEL_LAYERS = 46
"""The largest model scales attention by hidden_size / heads instead of the head size. GGUF files do not record this."""


def read_gemma_gguf_fields(
    metadata: GGUFMetadata, fields: Mapping[str, Any], *, largest_model_layers: int
) -> dict[str, Any]:
    hidden, heads = fields["hidden_size"], fields["num_attention_heads"]
    even_head_dim = hidden // heads if hidden and heads else 0
    is_largest = metadata.integer("block_count") == largest_model_layers
    return {
        "query_pre_attn_scalar": even_head_dim
        if is_largest
        else metadata.integer("attention.key_length") or even_head_dim,
        "sliding_window": metadata.integer("attention.sliding_window"),
        "final_logit_softcapping": metadata.float("final_logit_softcapping"),
    }


def _read_gemma2_gguf_fields(metadata: GGUFMetadata, fields: Mapping[str, Any]) -> dict[str, Any]:
    return read_gemma_gguf_fields(metadata, fields, largest_model_layers=_LARGEST_MODEL_LAYERS) | {
        "attn_logit_softcapping": metadata.float("attn_logit_softcapping")
    }


GEMMA2 = GEMMA.derive(
    "gemma2",
    defaults={**GEMMA.defaults, "sliding_window_pattern": 2},
    missing_defaults={"num_key_value_heads": 4, "sliding_window": 4096},
    attention={
        "window": sliding_windows,
        "scale": lambda config: (config.raw.get("query_pre_attn_scalar") or 256.0) ** -0.5,
        "softcap": lambda config: config.raw.get("attn_logit_softcapping", 50.0),
        "output_norm": True,
    },
    mlp={"output_norm": True},
    decoder={"logit_softcap": lambda config: config.raw.get("final_logit_softcapping", 30.0)},
    gguf=GGUFFormat(
        architectures=("gemma2",),
        layer_modules={**LAYER_MODULES, **POST_NORM_MODULES},
        read_fields=_read_gemma2_gguf_fields,
    ),
)
