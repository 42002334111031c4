"""Qwen1.5's and Qwen2's mixtures of experts (Qwen Team, 2024): Qwen2 with experts in most layers, and a shared one with
a gate of its own."""

from quire.engine.checkpoint.families import shared_experts
from quire.engine.checkpoint.files import ModelConfig
from quire.engine.errors import ModelError
from quire.engine.layers.attention import AttentionSpec
from quire.engine.layers.moe import ExpertsSpec, SharedSpec
from quire.engine.layers.norm import NormSpec
from quire.engine.models import qwen2
from quire.engine.models.experts import expert_size, in_layers, routed
from quire.engine.models.spec import DecoderSpec


def spec(config: ModelConfig) -> DecoderSpec:
    raw = config.raw
    base = qwen2.spec(config).having(AttentionSpec, qkv_bias=raw.get("qkv_bias") is not False)
    return in_layers(gated_experts(config, NormSpec(config.norm_eps)), base, config)


def gated_experts(config: ModelConfig, norm: NormSpec) -> ExpertsSpec:
    """Those of Qwen's later families too. Raises ModelError."""
    name, width = shared_experts(config.raw)
    if not width:
        raise ModelError(f"model: config.json of a {config.model_type!r} lacks shared_expert_intermediate_size")
    routing = routed(config, normalized=bool(config.raw.get("norm_topk_prob")))
    shared = SharedSpec(width, name, gate="mlp.shared_expert_gate")
    return ExpertsSpec(*routing, expert_size(config), norm, shared)
