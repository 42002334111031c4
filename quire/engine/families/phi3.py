"""Phi-3 and Phi-4 (Abdin et al., 2024): LongRoPE for long contexts, partial RoPE."""

from __future__ import annotations

from quire.engine.families.base import (
    FUSED_MODULES,
    LAYER_MODULES,
    DecoderFamily,
    GGUFFormat,
    WeightNames,
    field_reader,
    longrope_parameters,
)

PHI3 = DecoderFamily(
    model_types=("phi3",),
    defaults={"rms_norm_eps": 1e-05, "original_max_position_embeddings": 4096, "max_position_embeddings": 4096},
    has_partial_rotary=True,
    has_longrope=True,
    attention={"rope": longrope_parameters, "window": field_reader("sliding_window")},
    weight_names=WeightNames(layer_modules=FUSED_MODULES),
    gguf=GGUFFormat(
        architectures=("phi3",),
        layer_modules={**LAYER_MODULES, "ffn_up": "mlp.gate_up_proj"},
        has_optional_window=True,
    ),
)
