"""Gemma 4's text models (Google, 2026): every sixth layer without a window has larger heads, a rotation that turns a
quarter of their numbers and, in large models, values that are keys; the last layers of small models read others' keys
and values, and all layers embeddings of their own; one model has experts beside its MLPs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from quire.engine.architecture.attention import AttentionLayerSpec
from quire.engine.architecture.decoder import DecoderSpec, LayerSpec
from quire.engine.architecture.mlp import MLPSpec
from quire.engine.architecture.moe import MoELayerSpec
from quire.engine.architecture.norm import NormSpec
from quire.engine.architecture.stream import LayerScalarSpec, OutputNormSpec, PerLayerInputGateSpec, PerLayerInputsSpec
from quire.engine.checkpoint.files import ModelConfig
from quire.engine.checkpoint.parts.unequal import UnequalLayer, unequal_layers
from quire.engine.errors import ModelError
from quire.engine.families.moe_fields import expert_intermediate_size, read_expert_count_and_routing
from quire.engine.families.spec import base_decoder_spec

_DEFAULT_ROPES = {
    True: {"rope_type": "default", "rope_theta": 10_000.0},
    False: {"rope_type": "proportional", "rope_theta": 1_000_000.0, "partial_rotary_factor": 0.25},
}
"""By whether a layer has a window, where config.json says nothing."""


def spec(config: ModelConfig) -> DecoderSpec:
    raw, norm = config.raw, NormSpec(config.norm_eps)
    if raw.get("use_bidirectional_attention") not in (None, False, "vision"):
        raise ModelError("model: use_bidirectional_attention: it makes an encoder, which is not served")
    rope_parameters = raw.get("rope_parameters") or {}
    ropes = {True: rope_parameters.get("sliding_attention"), False: rope_parameters.get("full_attention")}
    layers, size = unequal_layers(raw), raw.get("hidden_size_per_layer_input") or 0
    per_layer_inputs = None
    if size:
        vocab, image = raw.get("vocab_size_per_layer_input") or config.vocab_size, raw.get("pad_token_id") or 0
        if vocab < config.vocab_size or not 0 <= image < vocab:
            raise ModelError(
                f"model: config.json: vocab_size_per_layer_input: {vocab} tokens have embeddings of layers"
            )
        per_layer_inputs = PerLayerInputsSpec(vocab, size, len(layers), norm, image)
    return replace(
        base_decoder_spec(config),
        layers=tuple(
            _layer_spec(config, each, _rope(ropes[each.window is not None], each), index, size)
            for index, each in enumerate(layers)
        ),
        embedding_scale=config.hidden_size**0.5,
        logit_softcap=raw.get("final_logit_softcapping"),
        per_layer_inputs=per_layer_inputs,
    )


def _rope(rope_fields: Any, layer: UnequalLayer) -> dict[str, Any]:
    return _DEFAULT_ROPES[layer.window is not None] | {
        key: value for key, value in (rope_fields or {}).items() if value is not None
    }


def _layer_spec(config: ModelConfig, layer: UnequalLayer, rope: dict[str, Any], index: int, size: int) -> LayerSpec:
    biased, norm = bool(config.raw.get("attention_bias")), NormSpec(config.norm_eps)
    attention = AttentionLayerSpec(
        layer.heads,
        layer.kv_heads,
        layer.head_dim,
        scale=1.0,
        rope=rope,
        norm=norm,
        window=layer.window,
        qkv_bias=biased,
        out_bias=biased,
        qk_norm="heads",
        output_norm=True,
        v_norm=True,
        keys_are_values=layer.keys_are_values,
        kv_source_layer=layer.source,
        uses_bidirectional_spans=layer.window is not None,
    )
    mlp = MLPSpec(layer.inner, norm, activation="gelu_tanh", output_norm=True)
    input_gates = (PerLayerInputGateSpec(size, index, norm),) if size else ()
    return (attention, *_feed_forward_specs(config, mlp, norm), *input_gates, LayerScalarSpec("layer_scalar"))


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
