"""Gemma 4's text models (Google, 2026): every sixth layer without a window has larger heads, a rotation that turns a
quarter of their numbers and, in large models, values that are keys; the last layers of small models read others' keys
and values, and all layers embeddings of their own; one model has experts beside its MLPs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from quire.engine.checkpoint.files import ModelConfig
from quire.engine.checkpoint.parts.unequal import UnequalLayer, unequal_layers
from quire.engine.errors import ModelError
from quire.engine.layers.attention import AttentionSpec
from quire.engine.layers.mlp import MlpSpec
from quire.engine.layers.moe import ExpertsSpec
from quire.engine.layers.norm import NormSpec
from quire.engine.layers.stream.layer_inputs import LayerInputSpec, LayerInputsSpec
from quire.engine.layers.stream.scale import OutputNormSpec, ScaleSpec
from quire.engine.models.experts import expert_size, routed
from quire.engine.models.spec import DecoderSpec, LayerSpec, base_spec

_ROPES = {
    True: {"rope_type": "default", "rope_theta": 10_000.0},
    False: {"rope_type": "proportional", "rope_theta": 1_000_000.0, "partial_rotary_factor": 0.25},
}
"""By whether a layer has a window, where config.json says nothing."""


def spec(config: ModelConfig) -> DecoderSpec:
    raw, norm = config.raw, NormSpec(config.norm_eps)
    if raw.get("use_bidirectional_attention") not in (None, False, "vision"):
        raise ModelError("model: use_bidirectional_attention: it makes an encoder, which is not served")
    given = raw.get("rope_parameters") or {}
    ropes = {True: given.get("sliding_attention"), False: given.get("full_attention")}
    layers, size = unequal_layers(raw), raw.get("hidden_size_per_layer_input") or 0
    inputs = None
    if size:
        vocab, image = raw.get("vocab_size_per_layer_input") or config.vocab_size, raw.get("pad_token_id") or 0
        if vocab < config.vocab_size or not 0 <= image < vocab:
            raise ModelError(
                f"model: config.json: vocab_size_per_layer_input: {vocab} tokens have embeddings of layers"
            )
        inputs = LayerInputsSpec(vocab, size, len(layers), norm, image)
    return replace(
        base_spec(config),
        layers=tuple(
            _layer(config, each, _rope(ropes[each.window is not None], each), index, size)
            for index, each in enumerate(layers)
        ),
        embedding_scale=config.hidden_size**0.5,
        logit_softcap=raw.get("final_logit_softcapping"),
        layer_inputs=inputs,
    )


def _rope(given: Any, layer: UnequalLayer) -> dict[str, Any]:
    return _ROPES[layer.window is not None] | {key: value for key, value in (given or {}).items() if value is not None}


def _layer(config: ModelConfig, each: UnequalLayer, rope: dict[str, Any], index: int, size: int) -> LayerSpec:
    biased, norm = bool(config.raw.get("attention_bias")), NormSpec(config.norm_eps)
    attention = AttentionSpec(
        *(each.heads, each.kv_heads, each.head_dim),
        scale=1.0,
        rope=rope,
        norm=norm,
        window=each.window,
        qkv_bias=biased,
        out_bias=biased,
        qk_norm="heads",
        output_norm=True,
        v_norm=True,
        keys_are_values=each.keys_are_values,
        source=each.source,
        together=each.window is not None,
    )
    mlp = MlpSpec(each.inner, norm, activation="gelu_tanh", output_norm=True)
    inputs = (LayerInputSpec(size, index, norm),) if size else ()
    return (attention, *_feed_forward(config, mlp, norm), *inputs, ScaleSpec("layer_scalar"))


def _feed_forward(config: ModelConfig, mlp: MlpSpec, norm: NormSpec) -> LayerSpec:
    if not config.raw.get("enable_moe_block"):
        return (mlp,)
    experts = ExpertsSpec(
        *routed(config),
        expert_size(config),
        norm,
        output_norm=True,
        parallel=True,
        norms=("pre_feedforward_layernorm_2", "post_feedforward_layernorm_2"),
        gelu=True,
        router_scale="router.scale",
        factors="router.per_expert_scale",
        name="",
        router="router.proj",
    )
    both = OutputNormSpec(norm, "post_feedforward_layernorm")
    return (replace(mlp, output_name="post_feedforward_layernorm_1"), experts, both)
