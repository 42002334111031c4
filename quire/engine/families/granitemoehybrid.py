"""Granite 4 (IBM, 2025): Granite with Mamba-2 in most layers, and experts with a shared MLP, or only an MLP. Some
models have no RoPE.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from quire.engine.architecture import DecoderSpec, MLPSpec
from quire.engine.families.base import (
    MAMBA2_DEFAULTS,
    MAMBA2_GGUF_TENSORS,
    MAMBA2_PROJECTIONS,
    MAMBA_GGUF_MODULES,
    DecoderFamily,
    GGUFFormat,
    GGUFMetadata,
    ModelConfig,
    check_mamba2_width,
    fill_hybrid_layer_types,
    fill_mamba2_head_dim,
    hybrid_mixers_reader,
    mamba2_spec,
    read_hybrid_layer_types,
    read_mamba2_fields,
    shared_expert_width,
)
from quire.engine.families.granite import GRANITE, read_gguf_multipliers
from quire.engine.families.granitemoe import GRANITE_GGUF_MODULES, GRANITEMOE


def _fill_granitemoehybrid_fields(fields: dict[str, Any]) -> None:
    fill_hybrid_layer_types(fields, lambda layer: "linear_attention")
    fill_mamba2_head_dim(fields)


def _build_granitemoehybrid_spec(config: ModelConfig) -> DecoderSpec:
    if config.raw.get("num_local_experts"):
        return GRANITEMOE.decoder_spec(config)
    dense_mlp = {"name": "shared_mlp", "intermediate_size": shared_expert_width(config.raw)}
    return GRANITE.decoder_spec(config).replace_sublayer_fields(MLPSpec, **dense_mlp)


def _read_granitemoehybrid_gguf_fields(metadata: GGUFMetadata, fields: Mapping[str, Any]) -> dict[str, Any]:
    experts, width = metadata.integer("expert_count"), metadata.integer("feed_forward_length")
    shared_width = metadata.integer("expert_shared_feed_forward_length")
    return {
        **read_gguf_multipliers(metadata, fields),
        **read_mamba2_fields(metadata, fields),
        "layer_types": read_hybrid_layer_types(metadata),
        "position_embedding_type": "rope" if metadata.flag("rope.scaling.finetuned") else "nope",
        "num_local_experts": experts or 0,
        "intermediate_size": metadata.integer("expert_feed_forward_length") or width,
        "shared_intermediate_size": shared_width or (0 if experts else width),
    }


GRANITEMOEHYBRID = DecoderFamily(
    model_types=("granitemoehybrid",),
    field_names={"layers_block_type": "layer_types"},
    defaults={**MAMBA2_DEFAULTS, "num_local_experts": 8, "num_experts_per_tok": 2, "shared_intermediate_size": 1024},
    fill_derived_fields=_fill_granitemoehybrid_fields,
    check_config=check_mamba2_width,
    other_layer_types=("linear_attention",),
    build_base_spec=_build_granitemoehybrid_spec,
    attention={"rope": lambda config: config.rope if config.raw.get("position_embedding_type") == "rope" else None},
    mixers=hybrid_mixers_reader(mamba2_spec),
    weight_names=replace(
        GRANITEMOE.weight_names,
        layer_modules={**GRANITEMOE.weight_names.layer_modules, "mamba.in_proj": MAMBA2_PROJECTIONS},
    ),
    gguf=GGUFFormat(
        architectures=("granitehybrid",),
        layer_modules={
            **GRANITE_GGUF_MODULES,
            **MAMBA_GGUF_MODULES,
            **{f"ffn_{name}": f"shared_mlp.{name}_proj" for name in ("gate", "up", "down")},
        },
        permutes_queries_and_keys=True,
        layer_tensors=MAMBA2_GGUF_TENSORS,
        has_optional_experts=True,
        read_fields=_read_granitemoehybrid_gguf_fields,
    ),
)
