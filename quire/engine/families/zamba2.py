"""Zamba 2 (Zyphra, 2024): Mamba-2 in all layers. In some layers, one of a few shared blocks of attention and MLP
precedes it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from quire.engine.architecture import AttentionLayerSpec, DecoderSpec, NormSpec, SharedTransformerSpec
from quire.engine.common.errors import ModelError
from quire.engine.families.base import (
    MAMBA2_DEFAULTS,
    MAMBA2_PROJECTIONS,
    DecoderFamily,
    LayerModules,
    ModelConfig,
    WeightNames,
    fill_hybrid_layer_types,
    fill_mamba2_head_dim,
    hidden_activation,
    mamba2_spec,
)
from quire.kernels.parameters.activation import GELU, Activation

_MAX_SHARED_USES = 64
"""The names of low-rank linears are listed in advance."""
_SHARED_MODULE = "shared_transformer"
_SHARED_GATE_UP = (f"{_SHARED_MODULE}.feed_forward.gate_proj", f"{_SHARED_MODULE}.feed_forward.up_proj")
_GATE_ACTIVATIONS: dict[str, Activation] = {
    each.kind: each for each in (GELU, Activation("gelu_tanh"), Activation("relu"), Activation("relu2"))
}


def _fill_zamba2_fields(fields: dict[str, Any]) -> None:
    """By default, a head has 2 * hidden size / heads elements, because attention reads twice the hidden size."""
    hybrid = [*range(6, 48, 6), 47, 51]
    fill_hybrid_layer_types(fields, lambda layer: "hybrid" if layer in hybrid else "linear_attention")
    fill_mamba2_head_dim(fields)
    heads, hidden, times = (fields.get(name) for name in ("num_attention_heads", "hidden_size", "mamba_expand"))
    if isinstance(hidden, int) and isinstance(heads, int) and heads > 0:
        fields["head_dim"] = fields.get("head_dim") or 2 * hidden // heads
        fields["intermediate_size"] = fields.get("intermediate_size") or 4 * hidden
    space_heads = fields.get("mamba_n_heads")
    if isinstance(hidden, int) and isinstance(times, int) and isinstance(space_heads, int) and space_heads > 0:
        fields["mamba_d_head"] = times * hidden // space_heads
    if fields.get("use_long_context"):
        fields["max_position_embeddings"] = 16_384


def _build_zamba2_spec(config: ModelConfig) -> DecoderSpec:
    raw, norm = config.raw, NormSpec(config.norm_eps)
    least = raw.get("time_step_min")
    limits = (0.001 if least is None else least, float("inf"))
    mamba2 = mamba2_spec(config, norm, dt_limits=limits, result_eps=1e-5, conv_bias=True)
    hybrid = [layer for layer, kind in enumerate(raw.get("layer_types") or ()) if kind == "hybrid"]
    if not config.tie_embeddings:
        raise ModelError("model: config.json: tie_word_embeddings: where it is false, transformers shares no blocks")
    if len(hybrid) > _MAX_SHARED_USES:
        raise ModelError(f"model: config.json: {len(hybrid)} layers share blocks, more than {_MAX_SHARED_USES}")
    num_blocks = max(int(raw.get("num_mem_blocks") or 1), 1)
    blocks = {
        layer: _shared_transformer_spec(config, weights_layer=hybrid[use % num_blocks], use_index=use)
        for use, layer in enumerate(hybrid)
    }
    mixer_after_shared = replace(mamba2, joins_input_only=True, parent_module="mamba_decoder")
    layers = tuple(
        (blocks[each], mixer_after_shared) if each in blocks else (mamba2,) for each in range(config.num_layers)
    )
    spec = DecoderSpec(config.vocab_size, config.hidden_size, layers, norm, tie_embeddings=config.tie_embeddings)
    return replace(spec, reads_embeddings=bool(blocks))


def _shared_transformer_spec(config: ModelConfig, *, weights_layer: int, use_index: int) -> SharedTransformerSpec:
    raw, norm = config.raw, NormSpec(config.norm_eps)
    if (activation := _GATE_ACTIVATIONS.get(hidden_activation(config) or "gelu")) is None:
        raise ModelError(f"model: hidden_act {raw.get('hidden_act')!r} is not supported in blocks that layers share")
    attention = AttentionLayerSpec(
        config.num_heads,
        config.num_kv_heads,
        config.head_dim,
        scale=(config.head_dim / 2) ** -0.5,
        rope=config.rope if raw.get("use_mem_rope") else None,
        norm=norm,
        input_norm=False,
        output_norm=True,
        input_size=2 * config.hidden_size,
    )
    return SharedTransformerSpec(
        attention,
        intermediate_size=config.intermediate_size,
        bias=bool(raw.get("mamba_proj_bias")),
        activation=activation,
        norm=norm,
        weights_layer=weights_layer,
        use_index=use_index,
        adapter_rank=raw.get("adapter_rank") or 128,
        adapts_attention=bool(raw.get("use_shared_attention_adapter")),
    )


def _adapter_modules() -> LayerModules:
    adapters = [f"{_SHARED_MODULE}.feed_forward.gate_up_proj_adapter_list.{use}.1" for use in range(_MAX_SHARED_USES)]
    return {name: (f"{name}.gate", f"{name}.up") for name in adapters}


ZAMBA2 = DecoderFamily(
    model_types=("zamba2",),
    field_names={
        "layers_block_type": "layer_types",
        "n_mamba_heads": "mamba_n_heads",
        "mamba_ngroups": "mamba_n_groups",
        "add_bias_linear": "mamba_proj_bias",
        "attention_head_dim": "head_dim",
    },
    defaults={
        **MAMBA2_DEFAULTS,
        "mamba_n_heads": 8,
        "mamba_d_state": 64,
        "rms_norm_eps": 1e-05,
        "hidden_act": "gelu",
        "vocab_size": 32000,
        "hidden_size": 2560,
        "num_hidden_layers": 54,
        "num_attention_heads": 32,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": True,
    },
    fill_derived_fields=_fill_zamba2_fields,
    other_layer_types=("linear_attention", "hybrid"),
    build_base_spec=_build_zamba2_spec,
    weight_names=WeightNames(
        model_modules={"final_layernorm": "norm"},
        layer_modules={
            "mamba.in_proj": MAMBA2_PROJECTIONS,
            "mamba_decoder.mamba.in_proj": tuple(f"mamba_decoder.{name}" for name in MAMBA2_PROJECTIONS),
            f"{_SHARED_MODULE}.pre_ff_layernorm": f"{_SHARED_MODULE}.post_attention_layernorm",
            f"{_SHARED_MODULE}.feed_forward.gate_up_proj": _SHARED_GATE_UP,
            **_adapter_modules(),
        },
    ),
)
