"""Command R7B and A (Cohere, 2025): Command R with sliding windows in three of four layers; the others leave positions
out."""

from quire.engine.checkpoint.families import layer_windows
from quire.engine.checkpoint.files import ModelConfig
from quire.engine.layers.attention import AttentionSpec
from quire.engine.models.classic import cohere
from quire.engine.models.spec import DecoderSpec


def spec(config: ModelConfig) -> DecoderSpec:
    windows = layer_windows(config.raw, config.num_layers)
    ropes = [None if window is None else config.rope for window in windows]
    return cohere.spec(config).having(AttentionSpec, window=windows, rope=ropes)
