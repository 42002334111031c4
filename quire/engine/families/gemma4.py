"""Gemma 4's text models (Google, 2026): every sixth layer has full attention, larger heads, RoPE on a quarter of each
head and, in large models, keys used as values. In small models the last layers reuse the KV cache of earlier ones, and
each layer has its own embeddings. One model has experts parallel to its MLPs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from quire.engine.architecture import (
    AttentionLayerSpec,
    DecoderSpec,
    LayerScalarSpec,
    LayerSpec,
    MLPSpec,
    MoELayerSpec,
    NormSpec,
    OutputNormSpec,
    PerLayerInputGateSpec,
    PerLayerInputsSpec,
)
from quire.engine.common.errors import ModelError
from quire.engine.families.base import (
    MAX_LAYERS,
    DecoderFamily,
    LayerOverrides,
    ModelConfig,
    StackedExperts,
    WeightNames,
    base_decoder_spec,
    expert_intermediate_size,
    fill_layer_types,
    normalize_rope,
    read_expert_count_and_routing,
)

_DEFAULT_ROPES = {
    True: {"rope_type": "default", "rope_theta": 10_000.0},
    False: {"rope_type": "proportional", "rope_theta": 1_000_000.0, "partial_rotary_factor": 0.25},
}
"""Keyed by whether the layer has a window."""
_MAX_LAYER_DIGITS = 8


def _fill_gemma4_fields(fields: dict[str, Any]) -> None:
    """The last layer gets full attention, whatever the file says."""
    fill_layer_types(fields, lambda layer: "sliding_attention" if (layer + 1) % 6 else "full_attention")
    layers, kinds = fields.get("num_hidden_layers"), fields.get("layer_types")
    if isinstance(layers, int) and 1 <= layers <= MAX_LAYERS and isinstance(kinds, list):
        fields["layer_types"] = [*kinds[:-1], "full_attention"]
    if not fields.get("enable_moe_block"):
        fields["num_experts"] = fields["num_experts_per_tok"] = None


def _build_gemma4_spec(config: ModelConfig) -> DecoderSpec:
    raw = config.raw
    if raw.get("use_bidirectional_attention") not in (None, False, "vision"):
        raise ModelError("model: use_bidirectional_attention: it makes an encoder, which is not served")
    overrides, sources = _layer_overrides(config), enumerate(_kv_source_layers(config))
    return replace(
        base_decoder_spec(config),
        layers=tuple(_layer_spec(config, layer, source, overrides) for layer, source in sources),
        embedding_scale=config.hidden_size**0.5,
        logit_softcap=raw.get("final_logit_softcapping"),
        per_layer_inputs=_per_layer_inputs_spec(config),
    )


def _per_layer_inputs_spec(config: ModelConfig) -> PerLayerInputsSpec | None:
    raw = config.raw
    if not (size := raw.get("hidden_size_per_layer_input") or 0):
        return None
    vocab, image = raw.get("vocab_size_per_layer_input") or config.vocab_size, raw.get("pad_token_id") or 0
    if vocab < config.vocab_size or not 0 <= image < vocab:
        raise ModelError(f"model: config.json: vocab_size_per_layer_input: {vocab} tokens have embeddings of layers")
    return PerLayerInputsSpec(vocab, size, config.num_layers, NormSpec(config.norm_eps), image)


def _kv_source_layers(config: ModelConfig) -> list[int | None]:
    """The last layers read keys from the last layer of their type that has its own."""
    kinds, shared = list(config.raw.get("layer_types") or ()), config.raw.get("num_kv_shared_layers") or 0
    if shared >= len(kinds):
        raise ModelError(
            f"model: config.json: num_kv_shared_layers: {shared} of {len(kinds)} layers leave none to read from"
        )
    own = kinds[: len(kinds) - shared]
    sources: list[int | None] = [None] * len(own)
    for kind in kinds[len(own) :]:
        if kind not in own:
            raise ModelError(f"model: config.json: num_kv_shared_layers: no layer has keys for a {kind}")
        sources.append(len(own) - 1 - own[::-1].index(kind))
    return sources


def _layer_spec(
    config: ModelConfig, layer: int, kv_source_layer: int | None, overrides: Mapping[int, LayerOverrides] | None
) -> LayerSpec:
    raw, norm = config.raw, NormSpec(config.norm_eps)
    has_window = "sliding" in (raw.get("layer_types") or ())[layer]
    ropes = raw.get("rope_parameters") or {}
    window = raw.get("sliding_window") or None if has_window else None
    rope_fields = ropes.get("full_attention") if window is None else ropes.get("sliding_attention")
    num_kv_heads, head_dim = _kv_heads(config, layer, overrides, has_window=has_window)
    biased = bool(raw.get("attention_bias"))
    attention = AttentionLayerSpec(
        config.num_heads,
        num_kv_heads,
        head_dim,
        scale=1.0,
        rope=normalize_rope(rope_fields, _DEFAULT_ROPES[window is not None], raw.get("max_position_embeddings")),
        norm=norm,
        window=window,
        qkv_bias=biased,
        out_bias=biased,
        qk_norm="heads",
        output_norm=True,
        v_norm=True,
        keys_are_values=bool(raw.get("attention_k_eq_v")) and not has_window,
        kv_source_layer=kv_source_layer,
        uses_bidirectional_spans=window is not None,
    )
    is_wide = raw.get("use_double_wide_mlp") and kv_source_layer is not None
    width = config.intermediate_size * (2 if is_wide else 1)
    mlp = MLPSpec(width, norm, activation="gelu_tanh", output_norm=True)
    size = raw.get("hidden_size_per_layer_input") or 0
    input_gates = (PerLayerInputGateSpec(size, layer, norm),) if size else ()
    return (attention, *_feed_forward_specs(config, mlp, norm), *input_gates, LayerScalarSpec("layer_scalar"))


def _kv_heads(
    config: ModelConfig, layer: int, overrides: Mapping[int, LayerOverrides] | None, *, has_window: bool
) -> tuple[int, int]:
    """Raises ModelError."""
    raw = config.raw
    num_kv_heads, head_dim = config.num_kv_heads, config.head_dim
    if overrides is not None:
        own = overrides.get(layer, {})
        num_kv_heads, head_dim = own.get("num_key_value_heads") or num_kv_heads, own.get("head_dim") or head_dim
    elif not has_window:
        head_dim = raw.get("global_head_dim") or 512
        num_kv_heads = (raw.get("attention_k_eq_v") and raw.get("num_global_key_value_heads")) or num_kv_heads
    if head_dim % 2:
        raise ModelError(
            f"model: config.json: head_dim: a head must have an even size, got {head_dim} in layer {layer}"
        )
    if config.num_heads % num_kv_heads:
        problem = f"{num_kv_heads} in layer {layer} do not divide the {config.num_heads} query heads"
        raise ModelError(f"model: config.json: num_key_value_heads: {problem}")
    return num_kv_heads, head_dim


def _layer_overrides(config: ModelConfig) -> Mapping[int, LayerOverrides] | None:
    """Keys may have leading zeros."""
    if (by_layer := config.raw.get("per_layer_config")) is None:
        return None
    overrides: dict[int, LayerOverrides] = {}
    for key, own in by_layer.items():
        if not key.isdecimal() or len(key) > _MAX_LAYER_DIGITS:
            raise ModelError(f"model: config.json: per_layer_config: {key[:40]!r} is not a layer index")
        overrides.setdefault(int(key), own or {})
    return overrides


def _feed_forward_specs(config: ModelConfig, mlp: MLPSpec, norm: NormSpec) -> LayerSpec:
    if not config.raw.get("enable_moe_block"):
        return (mlp,)
    experts = MoELayerSpec(
        *read_expert_count_and_routing(config),
        expert_intermediate_size(config),
        norm,
        output_norm=True,
        parallel=True,
        norm_names=("pre_feedforward_layernorm_2", "post_feedforward_layernorm_2"),
        gelu=True,
        router_scale="router.scale",
        expert_scales="router.per_expert_scale",
        name="",
        router="router.proj",
    )
    both = OutputNormSpec(norm, "post_feedforward_layernorm")
    return (replace(mlp, output_norm_name="post_feedforward_layernorm_1"), experts, both)


GEMMA4 = DecoderFamily(
    model_types=("gemma4_text",),
    field_names={"top_k_experts": "num_experts_per_tok"},
    defaults={
        "vocab_size": 262_144,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 30,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131_072,
        "tie_word_embeddings": True,
        "sliding_window": 512,
        "hidden_size_per_layer_input": 256,
        "vocab_size_per_layer_input": 262_144,
    },
    has_partial_rotary=True,
    fill_derived_fields=_fill_gemma4_fields,
    build_base_spec=_build_gemma4_spec,
    weight_names=WeightNames(stacked_experts=StackedExperts(gate_up_halves=True)),
)
