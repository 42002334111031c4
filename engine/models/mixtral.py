"""Mixtral (Jiang et al., 2024): Mistral with experts in every layer."""

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
    return replace(mistral.spec(config), experts=in_layers(experts, config))
