"""ERNIE 4.5 with experts (Baidu, 2025): behind dense layers, chosen by weights that a bias corrects."""

from quire.engine.checkpoint.families import shared_experts
from quire.engine.checkpoint.files import ModelConfig
from quire.engine.layers.moe import ExpertsSpec, SharedSpec
from quire.engine.layers.norm import NormSpec
from quire.engine.models.dense import ernie4_5
from quire.engine.models.experts import expert_size, in_layers, routed
from quire.engine.models.spec import DecoderSpec


def spec(config: ModelConfig) -> DecoderSpec:
    raw, (name, width) = config.raw, shared_experts(config.raw)
    experts = ExpertsSpec(
        *routed(config, added=raw.get("moe_norm_min") or 0.0),
        expert_size(config),
        NormSpec(config.norm_eps),
        SharedSpec(width, name, bias=bool(raw.get("use_bias"))) if width else None,
        float_router=True,
        correction="moe_statics.e_score_correction_bias",
        correction_row=True,
    )
    return in_layers(experts, ernie4_5.spec(config), config)
