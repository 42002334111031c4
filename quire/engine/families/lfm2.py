"""LFM2 (Liquid AI, 2025): gated short convolutions in most layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.engine.architecture import NormSpec, ShortConvSpec
from quire.engine.families.base import (
    LAYER_MODULES,
    MAX_WIDTH,
    SHORT_CONV_PROJECTIONS,
    DecoderFamily,
    GGUFFormat,
    GGUFMetadata,
    ModelConfig,
    WeightNames,
    fill_layer_types,
    hybrid_mixers_reader,
    read_hybrid_layer_types,
)


def short_conv_spec(config: ModelConfig, norm: NormSpec) -> ShortConvSpec:
    raw = config.raw
    return ShortConvSpec(config.hidden_size, raw.get("conv_L_cache") or 3, norm, bool(raw.get("conv_bias")))


def fill_lfm2_layer_types(fields: dict[str, Any]) -> None:
    listed = fields.get("full_attn_idxs")
    if listed is None:
        fill_layer_types(fields, lambda layer: "full_attention")
    elif isinstance(listed, list):
        attention_layers = {each for each in listed if isinstance(each, int)}
        fill_layer_types(fields, lambda layer: "full_attention" if layer in attention_layers else "conv")


def _fill_lfm2_fields(fields: dict[str, Any]) -> None:
    fill_lfm2_layer_types(fields)
    width, unit = fields.get("intermediate_size"), fields.get("block_multiple_of") or 256
    factor = fields.get("block_ffn_dim_multiplier") or 1.0
    if not isinstance(width, int) or not isinstance(unit, int) or not isinstance(factor, int | float):
        return
    if fields.get("block_auto_adjust_ff_dim") is False:
        return
    if 1 <= width <= MAX_WIDTH and 1 <= unit <= MAX_WIDTH and 0 < factor < 1e6:
        fields["intermediate_size"] = -(-int(factor * int(2 * width / 3)) // unit) * unit
        fields["block_auto_adjust_ff_dim"] = False


LFM2_GGUF_MODULES = {
    **LAYER_MODULES,
    **{f"shortconv.{name}": f"conv.{name}" for name in ("conv", "in_proj", "out_proj")},
}
LFM2_GGUF_MODEL_MODULES = {"token_embd_norm": "model.norm"}
"""GGUF files misname the norm after all layers."""


def read_short_conv_gguf_fields(metadata: GGUFMetadata, fields: Mapping[str, Any]) -> dict[str, Any]:
    own: dict[str, Any] = {"conv_L_cache": metadata.integer("shortconv.l_cache"), "block_auto_adjust_ff_dim": False}
    if metadata.is_list("attention.head_count_kv"):
        own["layer_types"] = read_hybrid_layer_types(metadata, "conv")
    return own


LFM2 = DecoderFamily(
    model_types=("lfm2",),
    field_names={
        "norm_eps": "rms_norm_eps",
        "tie_embedding": "tie_word_embeddings",
        "block_ff_dim": "intermediate_size",
    },
    defaults={
        "tie_word_embeddings": True,
        "rms_norm_eps": 1e-05,
        "rope_theta": 1_000_000.0,
        "conv_L_cache": 3,
        "max_position_embeddings": 128_000,
    },
    missing_defaults={"num_key_value_heads": 8},
    fill_derived_fields=_fill_lfm2_fields,
    other_layer_types=("conv",),
    attention={"qk_norm": "heads"},
    mixers=hybrid_mixers_reader(short_conv_spec, kinds=("conv",)),
    weight_names=WeightNames(
        model_modules={"embedding_norm": "norm"},
        layer_modules={
            "operator_norm": "input_layernorm",
            "ffn_norm": "post_attention_layernorm",
            "self_attn.q_layernorm": "self_attn.q_norm",
            "self_attn.k_layernorm": "self_attn.k_norm",
            "self_attn.out_proj": "self_attn.o_proj",
            "conv.in_proj": SHORT_CONV_PROJECTIONS,
            "feed_forward.w1": "mlp.gate_proj",
            "feed_forward.w3": "mlp.up_proj",
            "feed_forward.w2": "mlp.down_proj",
        },
    ),
    gguf=GGUFFormat(
        architectures=("lfm2",),
        layer_modules=LFM2_GGUF_MODULES,
        model_modules=LFM2_GGUF_MODEL_MODULES,
        read_fields=read_short_conv_gguf_fields,
    ),
)
