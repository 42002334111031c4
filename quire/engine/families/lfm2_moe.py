"""LFM2 MoE (Liquid AI, 2025): experts after dense layers, sigmoid routing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.engine.families.base import (
    W123_EXPERT_NAMES,
    GGUFFormat,
    GGUFMetadata,
    default_true_reader,
    expert_intermediate_size,
    expert_modules,
    field_reader,
    moe_reader,
    read_moe_fields,
)
from quire.engine.families.lfm2 import (
    LFM2,
    LFM2_GGUF_MODEL_MODULES,
    LFM2_GGUF_MODULES,
    fill_lfm2_layer_types,
    read_short_conv_gguf_fields,
)


def _read_lfm2_moe_gguf_fields(metadata: GGUFMetadata, fields: Mapping[str, Any]) -> dict[str, Any]:
    return read_moe_fields(metadata) | {"norm_topk_prob": True} | read_short_conv_gguf_fields(metadata, fields)


LFM2_MOE = LFM2.derive(
    "lfm2_moe",
    field_names={
        "norm_eps": "rms_norm_eps",
        "tie_embedding": "tie_word_embeddings",
        "num_dense_layers": "first_k_dense_replace",
    },
    defaults={**LFM2.defaults, "first_k_dense_replace": 2},
    fill_derived_fields=fill_lfm2_layer_types,
    experts=moe_reader(
        {
            "score_function": "sigmoid",
            "normalizer_eps": 1e-6,
            "is_normalized": default_true_reader("norm_topk_prob"),
            "scale": field_reader("routed_scaling_factor", 1.0),
        },
        size=expert_intermediate_size,
        correction=lambda config: "expert_bias" if config.raw.get("use_expert_bias") is not False else None,
        name="feed_forward",
        **W123_EXPERT_NAMES,
    ),
    gguf=GGUFFormat(
        architectures=("lfm2moe",),
        layer_modules={**LFM2_GGUF_MODULES, **expert_modules("feed_forward", gate="w1", up="w3", down="w2")},
        layer_tensors={"exp_probs_b.bias": "feed_forward.expert_bias"},
        model_modules=LFM2_GGUF_MODEL_MODULES,
        read_fields=_read_lfm2_moe_gguf_fields,
    ),
)
