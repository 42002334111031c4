"""Qwen3's mixtures of experts (Yang et al., 2025): Qwen3 with experts in most layers."""

from quire.engine.checkpoint.files import ModelConfig
from quire.engine.errors import ModelError
from quire.engine.layers.moe import ExpertsSpec
from quire.engine.layers.norm import NormSpec
from quire.engine.models import qwen3
from quire.engine.models.decoder import DecoderSpec
from quire.engine.models.experts import expert_numbers, in_layers


def spec(config: ModelConfig) -> DecoderSpec:
    raw = config.raw
    if (inner := raw.get("moe_intermediate_size")) is None:
        raise ModelError("model: config.json of a 'qwen3_moe' lacks moe_intermediate_size, needed to build its experts")
    normalized, norm = bool(raw.get("norm_topk_prob")), NormSpec(config.norm_eps)
    experts = ExpertsSpec(*expert_numbers(config), intermediate_size=inner, normalized=normalized, norm=norm)
    return in_layers(experts, qwen3.spec(config), config)
