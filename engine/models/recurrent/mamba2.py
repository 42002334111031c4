"""Mamba 2 (Dao and Gu, 2024): state spaces alone, without attention and without MLPs."""

from quire.engine.checkpoint.files import ModelConfig
from quire.engine.layers.norm import NormSpec
from quire.engine.models.recurrent.state_space import state_space
from quire.engine.models.spec import DecoderSpec


def spec(config: ModelConfig) -> DecoderSpec:
    layers = ((state_space(config),),) * config.num_layers
    shape = (config.vocab_size, config.hidden_size, layers, NormSpec(config.norm_eps))
    return DecoderSpec(*shape, tie_embeddings=config.tie_embeddings)
