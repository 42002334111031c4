"""Command R (Cohere, 2024): LayerNorms without bias, interleaved RoPE, scaled logits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.engine.common.errors import ModelError
from quire.engine.families.base import (
    PARALLEL_MLP,
    DecoderFamily,
    GGUFFormat,
    GGUFMetadata,
    ModelConfig,
    WeightNames,
    attention_bias_readers,
    layer_norm_reader,
)


def _logit_scale(config: ModelConfig) -> float:
    if isinstance(scale := config.raw.get("logit_scale"), str):
        raise ModelError(f"model: config.json: logit_scale: expected float, got {scale!r}")
    return 1.0 if scale is None else scale


def read_cohere_gguf_fields(metadata: GGUFMetadata, fields: Mapping[str, Any]) -> dict[str, Any]:
    has_norm = metadata.has_tensor("blk.0.attn_q_norm.weight")
    return {"logit_scale": metadata.float("logit_scale"), "use_qk_norm": has_norm}


COHERE = DecoderFamily(
    model_types=("cohere",),
    field_names={"layer_norm_eps": "rms_norm_eps"},
    defaults={
        "tie_word_embeddings": True,
        "rms_norm_eps": 1e-05,
        "logit_scale": 0.0625,
        "rope_theta": 500_000.0,
        "max_position_embeddings": 8192,
    },
    norm=layer_norm_reader(bias=False),
    attention={
        "qk_norm": lambda config: "centred" if config.raw.get("use_qk_norm") else None,
        **attention_bias_readers("attention_bias"),
    },
    mlp=PARALLEL_MLP,
    decoder={"logit_scale": _logit_scale},
    weight_names=WeightNames(has_interleaved_rope=True),
    gguf=GGUFFormat(
        architectures=("command-r",),
        read_fields=read_cohere_gguf_fields,
    ),
)
