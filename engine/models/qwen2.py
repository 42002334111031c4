"""Qwen2 and Qwen2.5 (Yang et al., 2024): biases on query, key and value; some models slide a window in upper layers."""

from quire.engine.checkpoint.files import ModelConfig
from quire.engine.layers.attention import AttentionSpec
from quire.engine.models.decoder import DecoderSpec, base_spec


def spec(config: ModelConfig) -> DecoderSpec:
    return base_spec(config).having(AttentionSpec, window=layer_windows(config), qkv_bias=True)


def layer_windows(config: ModelConfig) -> list[int | None]:
    """Per layer, from layer_types, or in older files from max_window_layers: that layer and all after it slide."""
    window = config.raw.get("sliding_window") if config.raw.get("use_sliding_window") else None
    first = config.raw.get("max_window_layers")
    first = config.num_layers if first is None else first
    default = ["sliding_attention" if layer >= first else "full_attention" for layer in range(config.num_layers)]
    types = config.raw.get("layer_types") or default
    return [window if kind == "sliding_attention" else None for kind in types]
