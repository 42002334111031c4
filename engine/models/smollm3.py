"""SmolLM3 (Bakouch et al., 2025): a Llama in which every few layers leave positions out (NoPE, Yang et al., 2025)."""

from engine.model_files import ModelConfig
from engine.models.decoder import DecoderSpec, base_spec
from engine.models.qwen2 import layer_windows


def spec(config: ModelConfig) -> DecoderSpec:
    every = config.raw.get("no_rope_layer_interval", 4)
    default = [int((layer + 1) % every != 0) for layer in range(config.num_layers)]
    ropes = tuple(config.rope if rotated else None for rotated in config.raw.get("no_rope_layers") or default)
    bias = bool(config.raw.get("attention_bias", False))
    return DecoderSpec(
        **base_spec(config) | {"windows": layer_windows(config), "ropes": ropes},
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=bool(config.raw.get("mlp_bias", False)),
    )
