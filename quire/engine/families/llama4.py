"""Llama 4 (Meta, 2025): experts that scale their inputs by the routing weights, and a shared expert. Layers with RoPE
have chunked attention and QK norms without weights.
"""

from __future__ import annotations

from typing import Any

from quire.engine.architecture import QueryScaling
from quire.engine.families.base import (
    FEED_FORWARD_MODULES,
    DecoderFamily,
    ModelConfig,
    StackedExperts,
    WeightNames,
    attention_bias_readers,
    field_reader,
    fill_layer_types,
    layer_windows,
    mlp_intermediate_size,
    moe_reader,
    optional_moe_reader,
    periodic_nope_ropes,
    shared_expert_reader,
)


def _fill_llama4_fields(fields: dict[str, Any]) -> None:
    every, rotates = fields.get("no_rope_layer_interval") or 4, fields.get("no_rope_layers")
    if isinstance(every, int) and every >= 1:
        fill_layer_types(fields, lambda layer: _layer_type(layer, every, rotates))


def _layer_type(layer: int, every: int, rotates: Any) -> str:
    is_listed = isinstance(rotates, list) and layer < len(rotates)
    return "chunked_attention" if (rotates[layer] if is_listed else (layer + 1) % every != 0) else "full_attention"


def _chunk_sizes(config: ModelConfig) -> tuple[int | None, ...]:
    """None for full attention, or if the longest context fits in a chunk."""
    longest = config.max_model_len or config.max_position
    sizes = layer_windows({**config.raw, "sliding_window": config.raw.get("attention_chunk_size")}, config.num_layers)
    return tuple(None if size is None or size >= longest else size for size in sizes)


def _qk_norms(config: ModelConfig) -> list[str | None]:
    uses_qk_norm = config.raw.get("use_qk_norm") is not False
    return ["unit" if uses_qk_norm and rope is not None else None for rope in periodic_nope_ropes(config)]


def _query_scalings(config: ModelConfig) -> list[QueryScaling | None]:
    raw = config.raw
    scale = raw.get("attn_scale")
    scaling = None
    if raw.get("attn_temperature_tuning") not in (False, 0):
        scaling = QueryScaling(0.1 if scale is None else scale, raw.get("floor_scale") or 8192, first_position=1)
    return [scaling if rope is None else None for rope in periodic_nope_ropes(config)]


LLAMA4 = DecoderFamily(
    model_types=("llama4_text",),
    defaults={
        "rms_norm_eps": 1e-05,
        "rope_theta": 500_000.0,
        "head_dim": 128,
        "num_key_value_heads": 8,
        "intermediate_size_mlp": 16384,
        "num_local_experts": 16,
        "num_experts_per_tok": 1,
        "attention_chunk_size": 8192,
        "max_position_embeddings": 131_072,
    },
    fill_derived_fields=_fill_llama4_fields,
    other_layer_types=("chunked_attention",),
    attention={
        "rope": periodic_nope_ropes,
        "window": _chunk_sizes,
        "chunked": lambda config: [size is not None for size in _chunk_sizes(config)],
        "qk_norm": _qk_norms,
        "query_scaling": _query_scalings,
        **attention_bias_readers("attention_bias"),
    },
    mlp={"intermediate_size": field_reader("intermediate_size_mlp", 16384)},
    experts=optional_moe_reader(
        moe_reader(
            {"score_function": "sigmoid", "is_normalized": False, "weights_inputs": True},
            shared_expert=shared_expert_reader("feed_forward.shared_expert", size=mlp_intermediate_size),
            name="feed_forward",
            router="router",
        )
    ),
    weight_names=WeightNames(
        layer_modules=FEED_FORWARD_MODULES,
        has_interleaved_rope=True,
        stacked_experts=StackedExperts(gate_up_halves=True, always_transposed=True),
    ),
)
