"""Mamba 2 (Dao and Gu, 2024): only selective state spaces."""

from __future__ import annotations

from typing import Any

from quire.engine.families.base import (
    ATTENTION_FREE_MODULES,
    LAYER_MODULES,
    MAMBA2_DEFAULTS,
    MAMBA2_FIELD_NAMES,
    MAMBA2_GGUF_TENSORS,
    MAMBA2_PROJECTIONS,
    MAMBA_GGUF_MODULES,
    DecoderFamily,
    GGUFFormat,
    LayerModules,
    WeightNames,
    attention_free_builder,
    check_mamba2_width,
    fill_hybrid_layer_types,
    fill_mamba2_head_dim,
    mamba2_spec,
    read_mamba2_fields,
)

MAMBA2_MIXER_MODULES: LayerModules = {
    "norm": "input_layernorm",
    "mixer": "mamba",
    "mixer.in_proj": MAMBA2_PROJECTIONS,
    **{f"mixer.{name}": f"mamba.{name}" for name in ("conv1d", "norm", "out_proj")},
}


def _fill_mamba2_fields(fields: dict[str, Any]) -> None:
    fill_hybrid_layer_types(fields, lambda layer: "linear_attention")
    fill_mamba2_head_dim(fields)
    heads, hidden = fields.get("mamba_n_heads"), fields.get("hidden_size")
    fields |= {"num_attention_heads": heads, "num_key_value_heads": heads, "intermediate_size": hidden}
    fields["head_dim"] = fields.get("mamba_d_head")


MAMBA2 = DecoderFamily(
    model_types=("mamba2",),
    field_names={
        **MAMBA2_FIELD_NAMES,
        "num_heads": "mamba_n_heads",
        "head_dim": "mamba_d_head",
        "state_size": "mamba_d_state",
        "expand": "mamba_expand",
        "tie_embeddings": "tie_word_embeddings",
    },
    defaults={
        **MAMBA2_DEFAULTS,
        "mamba_n_groups": 8,
        "mamba_d_state": 128,
        "mamba_d_head": 64,
        "rms_norm_eps": 1e-05,
        "max_position_embeddings": 131_072,
    },
    fill_derived_fields=_fill_mamba2_fields,
    check_config=check_mamba2_width,
    other_layer_types=("linear_attention",),
    build_base_spec=attention_free_builder(mamba2_spec),
    weight_names=WeightNames(model_modules=ATTENTION_FREE_MODULES, layer_modules=MAMBA2_MIXER_MODULES),
    gguf=GGUFFormat(
        architectures=("mamba2",),
        layer_modules={**LAYER_MODULES, **MAMBA_GGUF_MODULES},
        layer_tensors=MAMBA2_GGUF_TENSORS,
        read_fields=read_mamba2_fields,
    ),
)
