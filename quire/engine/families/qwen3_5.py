"""Qwen3.5's text models (Qwen Team, 2026), dense and with experts: gated delta nets in most layers, attention with
gates in the others; norms whose weights are offsets from 1."""

from __future__ import annotations

from typing import Any

from quire.engine.architecture.norm import NormSpec
from quire.engine.architecture.recurrent import DeltaNetSpec
from quire.engine.architecture.sublayer import SublayerSpec
from quire.engine.errors import ModelError
from quire.engine.families.base.config_fields import attention_bias_readers
from quire.engine.families.base.family import Family
from quire.engine.families.base.layer_types import complete_layer_types, hybrid_mixers_reader
from quire.engine.families.base.model_config import ModelConfig
from quire.engine.families.base.moe_fields import GATED_SHARED_MOE
from quire.engine.families.base.ropes import mrope_axes_reader
from quire.engine.families.base.weight_names import GATED_DELTA_NET, StackedExperts, WeightNames


def delta_net_spec(config: ModelConfig, norm: NormSpec) -> SublayerSpec:
    raw = config.raw
    key_heads, heads = raw.get("linear_num_key_heads") or 16, raw.get("linear_num_value_heads") or 32
    key, value = raw.get("linear_key_head_dim") or 128, raw.get("linear_value_head_dim") or 128
    if heads % key_heads:
        raise ModelError(f"model: config.json: linear_num_key_heads: {key_heads} do not divide {heads} value heads")
    if key % 2:
        raise ModelError(f"model: config.json: linear_key_head_dim: expected an even number, got {key}")
    if value % 16:
        raise ModelError(f"model: config.json: linear_value_head_dim: expected a multiple of 16, got {value}")
    return DeltaNetSpec(heads, key, value, raw.get("linear_conv_kernel_dim") or 4, norm, key_heads)


def _complete(fields: dict[str, Any]) -> None:
    """Where config.json does not say which layers have attention, it says how many of them one has it."""
    every = fields.get("full_attention_interval") or 4
    if isinstance(every, int):
        complete_layer_types(fields, lambda layer: "linear_attention" if (layer + 1) % every else "full_attention")


QWEN3_5 = Family(
    model_types=("qwen3_5_text",),
    defaults={"head_dim": 256, "partial_rotary_factor": 0.25, "max_position_embeddings": 32768},
    missing_defaults={"num_key_value_heads": 4},
    rotates_part=True,
    multimodal_model_types=("qwen3_5",),
    complete=_complete,
    other_layer_types=("linear_attention",),
    norm=lambda config: NormSpec(config.norm_eps, 1.0),
    attention={
        "qk_norm": "heads",
        "has_output_gate": True,
        "mrope_axes": mrope_axes_reader((11, 11, 10)),
        **attention_bias_readers("attention_bias"),
    },
    mixers=hybrid_mixers_reader(delta_net_spec),
    weight_names=WeightNames(layer_modules=GATED_DELTA_NET),
)
QWEN3_5_MOE = QWEN3_5.derive(
    "qwen3_5_moe_text",
    defaults={**QWEN3_5.defaults, "norm_topk_prob": True, "intermediate_size": 512},
    missing_defaults={"num_key_value_heads": 2},
    multimodal_model_types=("qwen3_5_moe",),
    experts=GATED_SHARED_MOE,
    weight_names=WeightNames(layer_modules=GATED_DELTA_NET, stacked_experts=StackedExperts(gate_up_halves=True)),
)
