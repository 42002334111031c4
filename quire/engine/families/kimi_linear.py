"""Kimi Linear (Moonshot AI, 2025): Kimi Delta Attention in most layers, latent attention without RoPE in the others,
DeepSeek-V3's experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from quire.engine.architecture import KimiDeltaAttentionSpec, NormSpec, SublayerSpec
from quire.engine.common.errors import ModelError
from quire.engine.families.base import (
    BLOCK_SPARSE_MOE,
    GROUPED_ROUTING,
    DecoderFamily,
    ModelConfig,
    WeightNames,
    expert_intermediate_size,
    fill_layer_types,
    mla_spec,
    moe_reader,
    optional_moe_reader,
    shared_expert_reader,
)

_DEFAULT_PERIOD = 4
_SIZES = {
    "num_heads": "linear_num_heads",
    "head_dim": "linear_head_dim",
    "short_conv_kernel_size": "linear_conv_kernel_dim",
}
"""Fields of linear_attn_config, mapped to transformers' names."""
_DENSE_MODULES = {
    f"{module}.{name}_proj": f"mlp.{name}_proj"
    for module in ("mlp", "block_sparse_moe")
    for name in ("gate", "up", "down")
}
"""transformers saves MLPs of dense layers under the name of experts."""


def _fill_kimi_linear_fields(fields: dict[str, Any]) -> None:
    """Published files have linear_attn_config. transformers saves its contents as top-level fields."""
    linear = fields.get("linear_attn_config")
    linear = linear if isinstance(linear, dict) else {}
    fields |= {name: linear[alias] for alias, name in _SIZES.items() if linear.get(alias) is not None}
    full = linear.get("full_attn_layers")

    def has_attention(layer: int) -> bool:
        return layer + 1 in full if isinstance(full, list) else bool(layer) and layer % _DEFAULT_PERIOD == 0

    fill_layer_types(fields, lambda layer: "full_attention" if has_attention(layer) else "linear_attention")


def _check_kimi_linear(config: ModelConfig) -> None:
    """Kimi K3's additions are not served."""
    raw = config.raw
    linear = raw.get("linear_attn_config") or {}
    named = (linear.get("kda_layers"), linear.get("full_attn_layers"))
    if named != (None, None) and sorted([*(named[0] or ()), *(named[1] or ())]) != [*range(1, config.num_layers + 1)]:
        problem = f"kda_layers and full_attn_layers must name each of the {config.num_layers} layers once, from 1 on"
        raise ModelError(f"model: config.json: linear_attn_config: {problem}")
    for name in ("gate_lower_bound", "use_full_rank_gate"):
        if linear.get(name):
            raise ModelError(f"model: config.json: linear_attn_config: {name} is not supported")
    if raw.get("mla_use_nope") is False:
        raise ModelError("model: config.json: mla_use_nope: only latent attention without RoPE is supported")
    if (raw.get("moe_layer_freq") or 1) != 1:
        raise ModelError("model: config.json: moe_layer_freq: only 1 is supported")
    if (function := raw.get("moe_router_activation_func") or "sigmoid") != "sigmoid":
        raise ModelError(f"model: config.json: moe_router_activation_func: {function!r} is not supported")


def _mixers(config: ModelConfig, norm: NormSpec) -> Sequence[SublayerSpec | None]:
    attention, delta = mla_spec(config, norm, has_rope=False), _kimi_delta_attention_spec(config, norm)
    return [attention if kind == "full_attention" else delta for kind in config.raw.get("layer_types") or ()]


def _kimi_delta_attention_spec(config: ModelConfig, norm: NormSpec) -> KimiDeltaAttentionSpec:
    raw = config.raw
    heads, size = raw.get("linear_num_heads") or 32, raw.get("linear_head_dim") or 128
    if size % 16:
        raise ModelError(f"model: config.json: linear_head_dim: expected a multiple of 16, got {size}")
    return KimiDeltaAttentionSpec(heads, size, size, raw.get("linear_conv_kernel_dim") or 4, norm, low_rank=size)


KIMI_LINEAR = DecoderFamily(
    model_types=("kimi_linear",),
    field_names={
        "model_max_length": "max_position_embeddings",
        "moe_renormalize": "norm_topk_prob",
        "num_expert_group": "n_group",
        "num_experts": "num_local_experts",
        "num_experts_per_token": "num_experts_per_tok",
        "num_shared_experts": "n_shared_experts",
    },
    defaults={
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 1_048_576,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
        "num_local_experts": 256,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 1024,
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.446,
        "first_k_dense_replace": 1,
    },
    fill_derived_fields=_fill_kimi_linear_fields,
    other_layer_types=("linear_attention",),
    unsupported_fields={
        "attn_res_block_size": "is not supported (Kimi K3's attention residuals)",
        "mla_use_output_gate": "is not supported (Kimi K3's attention gates)",
        "routed_expert_hidden_size": "is not supported (Kimi K3's latent experts)",
    },
    check_config=_check_kimi_linear,
    mixers=_mixers,
    experts=optional_moe_reader(
        moe_reader(
            GROUPED_ROUTING,
            size=expert_intermediate_size,
            shared_expert=shared_expert_reader("block_sparse_moe.shared_experts"),
            correction="gate.e_score_correction_bias",
            **BLOCK_SPARSE_MOE,
        )
    ),
    weight_names=WeightNames(layer_modules=_DENSE_MODULES),
)
