"""Gemma 3's text models (Gemma Team, 2025): QK norms instead of softcapped scores. By default, every sixth layer has
full attention, with its own RoPE.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.engine.common.errors import ModelError
from quire.engine.families.base import (
    LAYER_MODULES,
    POST_NORM_MODULES,
    GGUFFormat,
    GGUFMetadata,
    ModelConfig,
    field_reader,
    ropes_by_window_reader,
)
from quire.engine.families.gemma2 import GEMMA2, read_gemma_gguf_fields


def _check_gemma3_config(config: ModelConfig) -> None:
    if config.raw.get("use_bidirectional_attention"):
        raise ModelError("model: use_bidirectional_attention is not supported: it makes an encoder")
    if not isinstance(every := config.raw.get("sliding_window_pattern"), int):
        raise ModelError(f"model: config.json: sliding_window_pattern: expected int, got {every!r}")


_LARGEST_MODEL_LAYERS = 62


def _read_gemma3_gguf_fields(metadata: GGUFMetadata, fields: Mapping[str, Any]) -> dict[str, Any]:
    own = read_gemma_gguf_fields(metadata, fields, largest_model_layers=_LARGEST_MODEL_LAYERS)
    local = {"rope_type": "default", "rope_theta": metadata.float("rope.freq_base_swa") or 10_000.0}
    own["rope_parameters"] = {"full_attention": fields["rope_parameters"], "sliding_attention": local}
    if not own["sliding_window"]:  # as in llama.cpp, all layers then have full attention
        own["sliding_window_pattern"] = 1
    return own


GEMMA3 = GEMMA2.derive(
    "gemma3_text",
    defaults={
        "tie_word_embeddings": True,
        "vocab_size": 262_208,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131_072,
        "sliding_window_pattern": 6,
    },
    missing_defaults={"sliding_window": 4096},
    multimodal_text_defaults={
        "vocab_size": 262_208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131_072,
    },
    check_config=_check_gemma3_config,
    attention={
        "qk_norm": "heads",
        "softcap": None,
        "rope": ropes_by_window_reader(
            field_reader("rope_theta", 1_000_000.0), field_reader("rope_local_base_freq", 10_000.0)
        ),
    },
    decoder={"logit_softcap": lambda config: config.raw.get("final_logit_softcapping")},
    gguf=GGUFFormat(
        architectures=("gemma3",),
        layer_modules={**LAYER_MODULES, **POST_NORM_MODULES},
        read_fields=_read_gemma3_gguf_fields,
    ),
)
