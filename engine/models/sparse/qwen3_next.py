"""Qwen3-Next (Qwen Team, 2025): Qwen3.5's layers, with experts in most of them, and one more that every token has."""

from quire.engine.checkpoint.files import ModelConfig
from quire.engine.layers.moe import ExpertsSpec, SharedSpec
from quire.engine.layers.norm import NormSpec
from quire.engine.models import qwen3_5
from quire.engine.models.decoder import DecoderSpec
from quire.engine.models.experts import expert_size, in_layers, routed


def spec(config: ModelConfig) -> DecoderSpec:
    width = config.raw.get("shared_expert_intermediate_size") or 512
    shared = SharedSpec(width, "mlp.shared_expert", "mlp.shared_expert_gate")
    routing = routed(config, normalized=bool(config.raw.get("norm_topk_prob")))
    experts = ExpertsSpec(*routing, expert_size(config), NormSpec(config.norm_eps, 1.0), shared)
    return in_layers(experts, qwen3_5.spec(config), config)
