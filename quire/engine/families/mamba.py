"""Mamba (Gu and Dao, 2023): only selective scans."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.engine.families.base import (
    ATTENTION_FREE_MODULES,
    LAYER_MODULES,
    MAMBA_DEFAULTS,
    MAMBA_FIELD_NAMES,
    MAMBA_GGUF_MODULES,
    MAMBA_GGUF_TENSORS,
    MAMBA_MODULES,
    DecoderFamily,
    GGUFFormat,
    GGUFMetadata,
    WeightNames,
    attention_free_builder,
    fill_layer_types,
    fill_mamba_sizes,
    mamba_spec,
    read_mamba_fields,
)


def fill_attention_free_mamba_fields(fields: dict[str, Any]) -> None:
    """Other code reads sizes of attention and MLPs too."""
    fill_mamba_sizes(fields, inner_size=fields.get("mamba_d_ssm"))
    if isinstance(inner := fields.get("mamba_d_ssm"), int):
        heads, head_size = fields["mamba_n_heads"], fields["mamba_d_head"]
        fields |= {"num_attention_heads": heads, "num_key_value_heads": heads, "head_dim": head_size}
        fields["intermediate_size"] = inner
    fields["layer_types"] = None
    fill_layer_types(fields, lambda layer: "linear_attention")


def read_attention_free_gguf_fields(metadata: GGUFMetadata, fields: Mapping[str, Any]) -> dict[str, Any]:
    return read_mamba_fields(metadata) | {"intermediate_size": metadata.integer("ssm.inner_size")}


MAMBA = DecoderFamily(
    model_types=("mamba",),
    field_names=MAMBA_FIELD_NAMES,
    defaults={**MAMBA_DEFAULTS, "rms_norm_eps": 1e-05, "tie_word_embeddings": True, "max_position_embeddings": 131_072},
    fill_derived_fields=fill_attention_free_mamba_fields,
    other_layer_types=("linear_attention",),
    build_base_spec=attention_free_builder(mamba_spec),
    weight_names=WeightNames(
        model_modules=ATTENTION_FREE_MODULES,
        layer_modules={
            "norm": "input_layernorm",
            "mixer": "mamba",
            **{name.replace("mamba.", "mixer."): own for name, own in MAMBA_MODULES.items()},
            **{f"mixer.{name}": f"mamba.{name}" for name in ("conv1d", "dt_proj", "out_proj")},
        },
    ),
    gguf=GGUFFormat(
        architectures=("mamba",),
        layer_modules={**LAYER_MODULES, **MAMBA_GGUF_MODULES},
        matches=lambda metadata: not metadata.flag("ssm.dt_b_c_rms"),
        layer_tensors=MAMBA_GGUF_TENSORS,
        read_fields=read_attention_free_gguf_fields,
    ),
)
