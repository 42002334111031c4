"""Nemotron-H (NVIDIA, 2025) and Nemotron 3: each layer is one ungated sublayer: Mamba-2, attention without RoPE, an
MLP, or experts, possibly in a latent space. Only time_step_min limits time steps, as in transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.engine.architecture import AttentionLayerSpec, DecoderSpec, LatentMoESpec, MLPSpec, NormSpec, SublayerSpec
from quire.engine.families.base import (
    ATTENTION_FREE_MODULES,
    GROUPED_ROUTING,
    LAYER_MODULES,
    MAMBA2_DEFAULTS,
    MAMBA2_FIELD_NAMES,
    MAMBA2_GGUF_TENSORS,
    MAMBA_GGUF_MODULES,
    MAX_LAYERS,
    DecoderFamily,
    GGUFFormat,
    GGUFMetadata,
    ModelConfig,
    WeightNames,
    expert_intermediate_size,
    expert_modules,
    fill_hybrid_layer_types,
    fill_mamba2_head_dim,
    flag_reader,
    mamba2_spec,
    moe_reader,
    read_hybrid_layer_types,
    read_mamba2_fields,
    shared_expert_modules,
    shared_expert_reader,
)
from quire.engine.families.mamba2 import MAMBA2_MIXER_MODULES

_PATTERN_LETTERS = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
LATENT_MOE_PROJECTIONS = ("mixer.fc1_latent_proj", "mixer.fc2_latent_proj")


def _fill_nemotron_h_fields(fields: dict[str, Any]) -> None:
    pattern = fields.get("hybrid_override_pattern")
    if not fields.get("layer_types") and isinstance(pattern, str):
        fields["layer_types"] = _parse_layer_pattern(pattern)
    if not fields.get("layer_types"):
        fields["layer_types"] = ["linear_attention", "moe", "full_attention", "mlp"]
    kinds = fields["layer_types"]
    if isinstance(kinds, list) and 1 <= len(kinds) <= MAX_LAYERS:
        fields["num_hidden_layers"] = len(kinds)  # replaces config.json's number
    if isinstance(kinds, list) and "mlp" not in kinds and "moe" not in kinds:
        fields["hidden_act"] = None  # only MLPs use it
    fill_hybrid_layer_types(fields, lambda layer: "linear_attention")
    _fill_mtp_layer_types(fields)
    fill_mamba2_head_dim(fields)


def _parse_layer_pattern(pattern: str) -> list[str]:
    return [_PATTERN_LETTERS.get(letter, letter) for letter in pattern[: MAX_LAYERS + 1]]


def _fill_mtp_layer_types(fields: dict[str, Any]) -> None:
    kinds, pattern = fields.get("mtp_layers_block_type"), fields.get("mtp_hybrid_override_pattern")
    if not kinds and isinstance(pattern, str):
        kinds = _parse_layer_pattern(pattern)
    mtp_fields = {"layer_types": kinds or ["full_attention", "moe"]}
    fill_hybrid_layer_types(mtp_fields, lambda layer: "full_attention")
    fields["mtp_layers_block_type"] = mtp_fields["layer_types"]


def _latent_moe_spec(config: ModelConfig) -> LatentMoESpec | None:
    size = config.raw.get("moe_latent_size")
    return LatentMoESpec(size, LATENT_MOE_PROJECTIONS, bool(config.raw.get("mlp_bias"))) if size else None


_MOE_READER = moe_reader(
    GROUPED_ROUTING,
    size=expert_intermediate_size,
    shared_expert=shared_expert_reader("mixer.shared_experts", is_required=True, bias=flag_reader("mlp_bias")),
    latent=_latent_moe_spec,
    shares_norm=True,
    gated=False,
    correction="gate.e_score_correction_bias",
    name="mixer",
)


def _build_nemotron_h_spec(config: ModelConfig) -> DecoderSpec:
    norm, kinds = NormSpec(config.norm_eps), config.raw.get("layer_types") or ()
    sublayers = {kind: _sublayer_spec(kind, config, norm) for kind in dict.fromkeys(kinds)}
    layers = tuple((sublayers[kind],) for kind in kinds)
    return DecoderSpec(config.vocab_size, config.hidden_size, layers, norm, tie_embeddings=config.tie_embeddings)


def _sublayer_spec(kind: str, config: ModelConfig, norm: NormSpec) -> SublayerSpec:
    bias = bool(config.raw.get("mlp_bias"))
    match kind:
        case "linear_attention":
            return mamba2_spec(config, norm, dt_limits=(config.raw.get("time_step_min") or 0.001, float("inf")))
        case "full_attention":
            sizes = (config.num_heads, config.num_kv_heads, config.head_dim)
            return AttentionLayerSpec(*sizes, scale=config.head_dim**-0.5, rope=None, norm=norm)
        case "mlp":
            width = config.intermediate_size
            return MLPSpec(width, norm, bias=bias, gated=False, activation="relu2", shares_norm=True)
    return _MOE_READER(config, norm)


def _read_nemotron_h_gguf_fields(metadata: GGUFMetadata, fields: Mapping[str, Any]) -> dict[str, Any]:
    is_moe, experts = metadata.architecture.endswith("_moe"), metadata.integer("expert_count")
    if experts and not is_moe:
        raise metadata.field_error("expert_count", f"{experts}, where models of this architecture have none")
    if is_moe and not experts:
        raise metadata.field_error("expert_count", "missing, where models of this architecture have experts")
    widths, kinds = metadata.integers("feed_forward_length"), read_hybrid_layer_types(metadata)
    other = "moe" if is_moe else "mlp"
    own = read_mamba2_fields(metadata, fields)
    own["layer_types"] = [other if width else kind for kind, width in zip(kinds, widths, strict=False)]
    if not is_moe:
        return own
    groups = metadata.integer("expert_group_count") or 1
    return own | {
        "moe_intermediate_size": metadata.integer("expert_feed_forward_length"),
        "moe_latent_size": metadata.integer("moe_latent_size"),
        "shared_expert_intermediate_size": metadata.integer("expert_shared_feed_forward_length"),
        "norm_topk_prob": bool(metadata.flag("expert_weights_norm")),
        "routed_scaling_factor": metadata.float("expert_weights_scale") or None,
        "n_group": groups,
        "topk_group": metadata.integer("expert_group_used_count") or groups,
        "num_nextn_predict_layers": metadata.integer("nextn_predict_layers"),
    }


NEMOTRON_H = DecoderFamily(
    model_types=("nemotron_h",),
    field_names={
        **MAMBA2_FIELD_NAMES,
        "mamba_dt_min": "time_step_min",
        "layers_block_type": "layer_types",
        "mamba_num_heads": "mamba_n_heads",
        "mamba_head_dim": "mamba_d_head",
        "ssm_state_size": "mamba_d_state",
        "mlp_hidden_act": "hidden_act",
        "n_routed_experts": "num_local_experts",
        "moe_shared_expert_intermediate_size": "shared_expert_intermediate_size",
    },
    defaults={
        **MAMBA2_DEFAULTS,
        "mamba_n_groups": 8,
        "mamba_d_state": 128,
        "mamba_d_head": 64,
        "rms_norm_eps": 1e-05,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 4096,
        "intermediate_size": 21504,
        "hidden_act": "relu2",
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 7688,
        "shared_expert_intermediate_size": 7688,
        "norm_topk_prob": True,
    },
    fill_derived_fields=_fill_nemotron_h_fields,
    other_layer_types=("linear_attention", "mlp", "moe"),
    build_base_spec=_build_nemotron_h_spec,
    weight_names=WeightNames(
        model_modules=ATTENTION_FREE_MODULES,
        layer_modules={
            **MAMBA2_MIXER_MODULES,
            **{f"mixer.{name}_proj": f"self_attn.{name}_proj" for name in "qkvo"},
            **{f"mixer.{name}_proj": f"mlp.{name}_proj" for name in ("up", "down")},
        },
    ),
    gguf=GGUFFormat(
        architectures=(
            "nemotron_h",
            "nemotron_h_moe",
        ),
        layer_modules={
            **LAYER_MODULES,
            **MAMBA_GGUF_MODULES,
            **expert_modules("mixer"),
            **shared_expert_modules("mixer.shared_experts"),
            "ffn_latent_down": LATENT_MOE_PROJECTIONS[0],
            "ffn_latent_up": LATENT_MOE_PROJECTIONS[1],
        },
        layer_tensors={**MAMBA2_GGUF_TENSORS, "exp_probs_b.bias": "mixer.gate.e_score_correction_bias"},
        has_optional_experts=True,
        read_fields=_read_nemotron_h_gguf_fields,
    ),
)
