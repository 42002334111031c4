"""Mixtral (Jiang et al., 2024): Mistral with experts in every layer, and no sliding window but config.json's own."""

from quire.engine.checkpoint.files import ModelConfig
from quire.engine.layers.attention import AttentionSpec
from quire.engine.layers.moe import ExpertsSpec
from quire.engine.layers.norm import NormSpec
from quire.engine.models.experts import in_layers, routed
from quire.engine.models.spec import DecoderSpec, base_spec


def spec(config: ModelConfig) -> DecoderSpec:
    experts = ExpertsSpec(
        *routed(config),
        intermediate_size=config.intermediate_size,
        norm=NormSpec(config.norm_eps),
        name="block_sparse_moe",
        gate="w1",
        up="w3",
        down="w2",
    )
    base = base_spec(config).having(AttentionSpec, window=config.raw.get("sliding_window") or None)
    return in_layers(experts, base, config)
