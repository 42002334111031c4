"""Nemotron-H (NVIDIA, 2025) and Nemotron 3: layers that are one sublayer each, a state space, attention without
positions, an MLP, or experts, these also of smaller vectors; all without gates. Of limits of steps it has time_step_min
alone, as transformers reads it."""

from __future__ import annotations

from typing import Any

from quire.engine.architecture.attention import AttentionLayerSpec
from quire.engine.architecture.decoder import DecoderSpec
from quire.engine.architecture.mlp import MLPSpec
from quire.engine.architecture.moe import LatentMoESpec
from quire.engine.architecture.norm import NormSpec
from quire.engine.architecture.sublayer import SublayerSpec
from quire.engine.families.base.attention_free import ATTENTION_FREE_MODULES
from quire.engine.families.base.config_fields import flag_reader
from quire.engine.families.base.family import Family
from quire.engine.families.base.mamba2_fields import (
    MAMBA2_DEFAULTS,
    MAMBA2_NAMES,
    complete_hybrid_layer_types,
    complete_mamba2,
    mamba2_spec,
)
from quire.engine.families.base.model_config import ModelConfig
from quire.engine.families.base.moe_fields import (
    GROUPED_ROUTING,
    expert_intermediate_size,
    moe_reader,
    shared_expert_reader,
)
from quire.engine.families.base.schema.config_schema import MAX_LAYERS
from quire.engine.families.base.weight_names import WeightNames
from quire.engine.families.mamba2 import MAMBA2_MIXER

_PATTERN_LETTERS = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
"""Of hybrid_override_pattern, as Nemotron-H was published."""
LATENT_PROJECTIONS = ("mixer.fc1_latent_proj", "mixer.fc2_latent_proj")
"""In a layer whose experts read and give smaller vectors (moe_latent_size): what makes these of the layer's, and the
layer's of them."""


def _complete(fields: dict[str, Any]) -> None:
    pattern = fields.get("hybrid_override_pattern")
    if not fields.get("layer_types") and isinstance(pattern, str):
        fields["layer_types"] = _read_pattern(pattern)
    if not fields.get("layer_types"):
        fields["layer_types"] = ["linear_attention", "moe", "full_attention", "mlp"]
    kinds = fields["layer_types"]
    if isinstance(kinds, list) and 1 <= len(kinds) <= MAX_LAYERS:
        fields["num_hidden_layers"] = len(kinds)  # whatever config.json says
    if isinstance(kinds, list) and "mlp" not in kinds and "moe" not in kinds:
        fields["hidden_act"] = None  # of MLPs alone, and there is none
    complete_hybrid_layer_types(fields, lambda layer: "linear_attention")
    _complete_mtp_layer_types(fields)
    complete_mamba2(fields)


def _read_pattern(pattern: str) -> list[str]:
    return [_PATTERN_LETTERS.get(letter, letter) for letter in pattern[: MAX_LAYERS + 1]]


def _complete_mtp_layer_types(fields: dict[str, Any]) -> None:
    """What the layers that draft tokens are, in the same words."""
    kinds, pattern = fields.get("mtp_layers_block_type"), fields.get("mtp_hybrid_override_pattern")
    if not kinds and isinstance(pattern, str):
        kinds = _read_pattern(pattern)
    mtp_fields = {"layer_types": kinds or ["full_attention", "moe"]}
    complete_hybrid_layer_types(mtp_fields, lambda layer: "full_attention")
    fields["mtp_layers_block_type"] = mtp_fields["layer_types"]


def _latent_moe_spec(config: ModelConfig) -> LatentMoESpec | None:
    size = config.raw.get("moe_latent_size")
    return LatentMoESpec(size, LATENT_PROJECTIONS, bool(config.raw.get("mlp_bias"))) if size else None


_EXPERTS = moe_reader(
    GROUPED_ROUTING,
    size=expert_intermediate_size,
    shared_expert=shared_expert_reader("mixer.shared_experts", is_required=True, bias=flag_reader("mlp_bias")),
    latent=_latent_moe_spec,
    shares_norm=True,
    gated=False,
    correction="gate.e_score_correction_bias",
    name="mixer",
)


def _build(config: ModelConfig) -> DecoderSpec:
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
    return _EXPERTS(config, norm)


NEMOTRON_H = Family(
    model_types=("nemotron_h",),
    field_names={
        **MAMBA2_NAMES,
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
    complete=_complete,
    other_layer_types=("linear_attention", "mlp", "moe"),
    build=_build,
    weight_names=WeightNames(
        model_modules=ATTENTION_FREE_MODULES,
        layer_modules={
            **MAMBA2_MIXER,
            **{f"mixer.{name}_proj": f"self_attn.{name}_proj" for name in "qkvo"},
            **{f"mixer.{name}_proj": f"mlp.{name}_proj" for name in ("up", "down")},
        },
    ),
)
