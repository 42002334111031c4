"""Bamba (IBM, 2024): a Llama whose attention, rotated in part, stands in some layers alone, and state spaces in the
others."""

from quire.engine.checkpoint.files import ModelConfig
from quire.engine.models import llama
from quire.engine.models.recurrent.state_space import in_place, state_space
from quire.engine.models.spec import DecoderSpec


def spec(config: ModelConfig) -> DecoderSpec:
    return llama.spec(config).mixing(in_place(config, state_space(config)))
