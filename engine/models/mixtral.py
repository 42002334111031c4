"""Mixtral (Jiang et al., 2024): Mistral with experts in every layer, and no sliding window but config.json's own."""

from dataclasses import replace

from quire.engine.checkpoint.files import ModelConfig
from quire.engine.layers.moe import ExpertsSpec
from quire.engine.models import mistral
from quire.engine.models.decoder import DecoderSpec
from quire.engine.models.experts import expert_numbers, in_layers


def spec(config: ModelConfig) -> DecoderSpec:
    experts = ExpertsSpec(
        *expert_numbers(config),
        intermediate_size=config.intermediate_size,
        normalized=True,
        part="block_sparse_moe",
        gate="w1",
        up="w3",
        down="w2",
    )
    windows = (config.raw.get("sliding_window"),) * config.num_layers
    return replace(mistral.spec(config), windows=windows, experts=in_layers(experts, config))
