"""ERNIE 4.5 MoE (Baidu, 2025): experts after dense layers, routing with a correction bias."""

from __future__ import annotations

from quire.engine.common.errors import ModelError
from quire.engine.families.base import (
    LAYER_MODULES,
    GGUFFormat,
    ModelConfig,
    expert_intermediate_size,
    expert_modules,
    flag_reader,
    moe_reader,
    read_moe_fields,
    shared_expert_modules,
    shared_expert_reader,
)
from quire.engine.families.ernie4_5 import ERNIE4_5


def _normalizer_eps(config: ModelConfig) -> float:
    """Quire adds moe_norm_min to the sum of weights, which is harmless up to 1e-6."""
    least = config.raw.get("moe_norm_min") or 0.0
    if least > 1e-6:
        raise ModelError(f"model: config.json: moe_norm_min: at most 1e-06 is served, got {least}")
    return least


ERNIE4_5_MOE = ERNIE4_5.derive(
    "ernie4_5_moe",
    field_names={
        "moe_num_experts": "num_experts",
        "moe_k": "num_experts_per_tok",
        "moe_num_shared_experts": "n_shared_experts",
        "moe_layer_start_index": "first_k_dense_replace",
        "moe_layer_interval": "decoder_sparse_step",
    },
    defaults={
        "tie_word_embeddings": True,
        "rms_norm_eps": 1e-05,
        "rope_theta": 500_000.0,
        "first_k_dense_replace": 1,
        "n_shared_experts": 2,
        "moe_norm_min": 1e-12,
        "max_position_embeddings": 131_072,
    },
    missing_defaults={"num_key_value_heads": 4},
    experts=moe_reader(
        {"normalizer_eps": _normalizer_eps},
        size=expert_intermediate_size,
        shared_expert=shared_expert_reader(bias=flag_reader("use_bias")),
        float_router=True,
        correction="moe_statics.e_score_correction_bias",
        correction_row=True,
    ),
    gguf=GGUFFormat(
        architectures=("ernie4_5-moe",),
        layer_modules={**LAYER_MODULES, **expert_modules(), **shared_expert_modules()},
        layer_tensors={"exp_probs_b.bias": "mlp.moe_statics.e_score_correction_bias"},
        read_fields=read_moe_fields,
    ),
)
