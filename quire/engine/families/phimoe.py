"""Phi-3.5-MoE (Abdin et al., 2024): LayerNorms, and two experts chosen by SparseMixer in every layer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from quire.engine.architecture import MoELayerSpec, NormSpec
from quire.engine.common.errors import ModelError
from quire.engine.families.base import (
    BLOCK_SPARSE_MOE,
    LAYER_MODULES,
    MIXTRAL_EXPERT_MODULES,
    GGUFFormat,
    ModelConfig,
    WeightNames,
    attention_bias_readers,
    flag_reader,
    longrope_parameters,
    moe_reader,
    read_mlp_sized_moe_fields,
)
from quire.engine.families.phi3 import PHI3


def _read_rope(config: ModelConfig) -> dict[str, Any]:
    """The attention factors of short and long contexts must be equal."""
    rope = dict(config.rope)
    short, long = (rope.pop(f"{name}_mscale", None) for name in ("short", "long"))
    if short != long:
        raise ModelError(f"model: config.json: rope_scaling: short_mscale {short} and long_mscale {long} must be equal")
    return longrope_parameters(replace(config, rope=rope if short is None else rope | {"attention_factor": short}))


def _router_jitter(config: ModelConfig) -> float:
    noise = config.raw.get("router_jitter_noise")
    return 0.01 if noise is None else noise


def _read_experts(config: ModelConfig, norm: NormSpec) -> MoELayerSpec:
    experts = moe_reader({"score_function": "mixer", "jitter": _router_jitter}, **BLOCK_SPARSE_MOE)(config, norm)
    if (count := experts.routing.top_k) != 2:
        raise ModelError(f"model: config.json: num_experts_per_tok: {count}, where a 'phimoe' has 2")
    return experts


PHIMOE = PHI3.derive(
    "phimoe",
    defaults={
        "rms_norm_eps": 1e-05,
        "rope_theta": 1_000_000.0,
        "num_experts_per_tok": 2,
        "max_position_embeddings": 131_072,
    },
    missing_defaults={"num_key_value_heads": 8},
    has_partial_rotary=False,
    norm=lambda config: NormSpec(config.norm_eps, is_layer_norm=True, bias=True),
    attention={"rope": _read_rope, **attention_bias_readers("attention_bias")},
    experts=_read_experts,
    decoder={"head_bias": flag_reader("lm_head_bias")},
    weight_names=WeightNames(),
    gguf=GGUFFormat(
        architectures=("phimoe",),
        layer_modules={**LAYER_MODULES, **MIXTRAL_EXPERT_MODULES},
        read_fields=read_mlp_sized_moe_fields,
    ),
)
