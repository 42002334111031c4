"""Falcon (Almazrouei et al., 2023): parallel attention and MLP, with one norm or two. Some models replace RoPE by
ALiBi, which is added before scores are scaled.
"""

from __future__ import annotations

from typing import Any

from quire.engine.families.base import (
    ModelConfig,
    WeightNames,
    fill_intermediate_size,
    flag_reader,
    layer_norm_family,
    set_multi_query_kv_heads,
)
from quire.engine.families.bloom import BLOOM_FIELD_NAMES, BLOOM_LAYER_MODULES


def _fill_falcon_fields(fields: dict[str, Any]) -> None:
    fill_intermediate_size(fields)
    set_multi_query_kv_heads(fields)


def _is_parallel(config: ModelConfig) -> bool:
    return bool(config.raw.get("new_decoder_architecture") or config.raw.get("parallel_attn"))


def _shares_norm(config: ModelConfig) -> bool:
    norms = config.raw.get("num_ln_in_parallel_attn") or (2 if config.raw.get("new_decoder_architecture") else 1)
    return _is_parallel(config) and norms == 1


FALCON = layer_norm_family(
    model_types=("falcon",),
    field_names=BLOOM_FIELD_NAMES,
    defaults={
        "tie_word_embeddings": True,
        "rms_norm_eps": 1e-05,
        "hidden_act": "gelu",
        "multi_query": True,
        "parallel_attn": True,
    },
    fill_derived_fields=_fill_falcon_fields,
    bias=flag_reader("use_bias"),
    attention={
        "rope": lambda config: None if config.raw.get("alibi") else config.rope,
        "alibi": lambda config: config.head_dim**-0.5 if config.raw.get("alibi") else None,
    },
    mlp={"parallel": _is_parallel, "shares_norm": _shares_norm},
    weight_names=WeightNames(
        model_modules={"word_embeddings": "embed_tokens", "ln_f": "norm"},
        layer_modules=BLOOM_LAYER_MODULES,
        is_fused_by_kv_head=True,
    ),
)
