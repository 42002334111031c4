"""Falcon-H1 (Zuo et al., 2025): attention and Mamba-2 in parallel in each layer, and many multipliers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from quire.engine.architecture import (
    AttentionLayerSpec,
    DecoderSpec,
    Mamba2LayerSpec,
    MLPSpec,
    NormSpec,
    ProjectionMultipliers,
)
from quire.engine.common.errors import ModelError
from quire.engine.families.bamba import BAMBA
from quire.engine.families.base import (
    LAYER_MODULES,
    MAMBA2_DEFAULTS,
    MAMBA2_GGUF_TENSORS,
    MAMBA_GGUF_MODULES,
    DecoderFamily,
    GGUFFormat,
    GGUFMetadata,
    ModelConfig,
    check_mamba2_width,
    fill_hybrid_layer_types,
    fill_mamba2_head_dim,
    mamba2_spec,
    read_mamba2_fields,
)
from quire.engine.families.llama import LLAMA


def _fill_falcon_h1_fields(fields: dict[str, Any]) -> None:
    fill_hybrid_layer_types(fields, lambda layer: "hybrid")
    fill_mamba2_head_dim(fields, inner_size=fields.get("mamba_d_ssm"))


def _build_falcon_h1_spec(config: ModelConfig) -> DecoderSpec:
    raw, base = config.raw, LLAMA.decoder_spec(config)
    read, out = raw.get("attention_in_multiplier") or 1.0, raw.get("attention_out_multiplier") or 1.0
    key = raw.get("key_multiplier") or 1.0
    if read != 1 and raw.get("attention_bias"):
        raise ModelError("model: config.json: attention_in_multiplier cannot be combined with attention_bias")
    scale = config.head_dim**-0.5 * read**2 * key
    base = base.replace_sublayer_fields(AttentionLayerSpec, scale=scale, output_scale=read * out)
    gate, down = raw.get("mlp_multipliers") or (1.0, 1.0)
    if raw.get("mlp_bias") and (gate, down) != (1, 1):
        raise ModelError("model: config.json: mlp_multipliers cannot be combined with mlp_bias")
    base = base.replace_sublayer_fields(MLPSpec, multipliers=[(gate, down)] * config.num_layers)
    mamba2 = _mamba2_spec(config, base.norm)
    layers = tuple((attention, mamba2, mlp) for attention, mlp in base.layers)
    embedding, head = raw.get("embedding_multiplier") or 1.0, raw.get("lm_head_multiplier") or 1.0
    return replace(base, layers=layers, embedding_scale=embedding, logit_scale=head)


def _mamba2_spec(config: ModelConfig, norm: NormSpec) -> Mamba2LayerSpec:
    raw = config.raw
    read, out = raw.get("ssm_in_multiplier") or 1.0, raw.get("ssm_out_multiplier") or 1.0
    z, x, b, c, dt = (read * factor for factor in raw.get("ssm_multipliers") or (1.0,) * 5)
    if (raw.get("mamba_proj_bias") and read != 1) or (raw.get("projectors_bias") and out != 1):
        raise ModelError(
            "model: config.json: ssm multipliers cannot be combined with biases of the projections that they scale"
        )
    before = "before" if raw.get("mamba_norm_before_gate") is not False else "behind"
    return mamba2_spec(
        config,
        norm,
        out_bias=bool(raw.get("projectors_bias")),
        result_norm=before if raw.get("mamba_rms_norm") else None,
        multipliers=ProjectionMultipliers(z, x, b, c, dt, out),
        parallel=True,
    )


def _read_falcon_h1_gguf_fields(metadata: GGUFMetadata, fields: Mapping[str, Any]) -> dict[str, Any]:
    """The weights in GGUF files already contain the multipliers."""
    has_norm = metadata.any_layer_has_tensor("ssm_norm.weight")
    return read_mamba2_fields(metadata, fields) | {"mamba_rms_norm": has_norm, "mamba_norm_before_gate": False}


FALCON_H1 = DecoderFamily(
    model_types=("falcon_h1",),
    field_names={"layers_block_type": "layer_types"},
    defaults={
        **MAMBA2_DEFAULTS,
        "rms_norm_eps": 1e-05,
        "num_key_value_heads": 8,
        "mamba_norm_before_gate": True,
        "max_position_embeddings": 8192,
    },
    missing_defaults={"mamba_d_ssm": 1024},
    check_config=check_mamba2_width,
    fill_derived_fields=_fill_falcon_h1_fields,
    other_layer_types=("hybrid",),
    build_base_spec=_build_falcon_h1_spec,
    weight_names=BAMBA.weight_names,
    gguf=GGUFFormat(
        architectures=("falcon-h1",),
        layer_modules={**LAYER_MODULES, **MAMBA_GGUF_MODULES},
        layer_tensors=MAMBA2_GGUF_TENSORS,
        read_fields=_read_falcon_h1_gguf_fields,
    ),
)
