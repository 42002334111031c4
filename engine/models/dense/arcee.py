"""Arcee's AFM (Arcee AI, 2025): a Llama whose MLP has no gate but a squared ReLU."""

from quire.engine.checkpoint.files import ModelConfig
from quire.engine.layers.mlp import MlpSpec
from quire.engine.models import llama
from quire.engine.models.spec import DecoderSpec


def spec(config: ModelConfig) -> DecoderSpec:
    return llama.spec(config).having(MlpSpec, gated=False, activation="relu2")
