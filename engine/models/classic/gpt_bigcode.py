"""StarCoder and SantaCoder (Li et al., 2023): GPT-2 with one key and value for all heads (Shazeer, 2019)."""

from quire.engine.checkpoint.files import ModelConfig
from quire.engine.models.classic import gpt2
from quire.engine.models.decoder import DecoderSpec


def spec(config: ModelConfig) -> DecoderSpec:
    return gpt2.spec(config)
