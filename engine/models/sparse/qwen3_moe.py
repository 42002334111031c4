"""Qwen3's mixtures of experts (Yang et al., 2025): Qwen3 with experts in most layers."""

from quire.engine.checkpoint.files import ModelConfig
from quire.engine.layers.moe import ExpertsSpec
from quire.engine.layers.norm import NormSpec
from quire.engine.models import qwen3
from quire.engine.models.experts import expert_size, in_layers, routed
from quire.engine.models.spec import DecoderSpec


def spec(config: ModelConfig) -> DecoderSpec:
    always = config.model_type == "qwen3_vl_moe_text"  # whose config.json does not say it
    routing = routed(config, normalized=always or bool(config.raw.get("norm_topk_prob")))
    experts = ExpertsSpec(*routing, expert_size(config), NormSpec(config.norm_eps))
    return in_layers(experts, qwen3.spec(config), config)
