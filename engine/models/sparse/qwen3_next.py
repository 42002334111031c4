"""Qwen3-Next (Qwen Team, 2025) and Qwen3.5's mixtures of experts: Qwen3.5's layers, with experts in most of them, and
one more that every token has."""

from quire.engine.checkpoint.files import ModelConfig
from quire.engine.layers.norm import NormSpec
from quire.engine.models import qwen3_5
from quire.engine.models.experts import in_layers
from quire.engine.models.sparse.qwen2_moe import gated_experts
from quire.engine.models.spec import DecoderSpec


def spec(config: ModelConfig) -> DecoderSpec:
    return in_layers(gated_experts(config, NormSpec(config.norm_eps, 1.0)), qwen3_5.spec(config), config)
