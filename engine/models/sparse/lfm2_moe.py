"""LFM2's mixtures of experts (Liquid AI, 2025): LFM2 with experts behind dense layers, weighed by sigmoids."""

from quire.engine.checkpoint.files import ModelConfig
from quire.engine.layers.moe import ExpertsSpec
from quire.engine.layers.norm import NormSpec
from quire.engine.models import lfm2
from quire.engine.models.experts import expert_size, in_layers, routed
from quire.engine.models.spec import DecoderSpec


def spec(config: ModelConfig) -> DecoderSpec:
    raw = config.raw
    rules = {"normalized": raw.get("norm_topk_prob") is not False, "scale": raw.get("routed_scaling_factor") or 1.0}
    experts = ExpertsSpec(
        *routed(config, weights="sigmoid", added=1e-6, **rules),
        expert_size(config),
        NormSpec(config.norm_eps),
        correction="expert_bias" if raw.get("use_expert_bias") is not False else None,
        name="feed_forward",
        gate="w1",
        up="w3",
        down="w2",
    )
    return in_layers(experts, lfm2.spec(config), config)
