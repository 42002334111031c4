"""SmolLM3 (Bakouch et al., 2025): a Llama in which every few layers leave positions out (NoPE, Yang et al., 2025)."""

from quire.engine.checkpoint.families import layer_windows
from quire.engine.checkpoint.files import ModelConfig
from quire.engine.layers.attention import AttentionSpec
from quire.engine.models import llama
from quire.engine.models.spec import DecoderSpec


def spec(config: ModelConfig) -> DecoderSpec:
    every = config.raw.get("no_rope_layer_interval") or 4
    default = [int((layer + 1) % every != 0) for layer in range(config.num_layers)]
    ropes = [config.rope if rotated else None for rotated in config.raw.get("no_rope_layers") or default]
    return llama.spec(config).having(AttentionSpec, window=layer_windows(config.raw, config.num_layers), rope=ropes)
