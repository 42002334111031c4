"""What a decoder consists of: layers, each a tuple of parts' specs. A family's file maps a config.json to one."""

from __future__ import annotations

from quire.engine.architecture.attention import AttentionLayerSpec
from quire.engine.architecture.decoder import DecoderSpec
from quire.engine.architecture.mlp import MLPSpec
from quire.engine.architecture.norm import NormSpec
from quire.engine.architecture.rope import parse_mrope_axes
from quire.engine.checkpoint.families import AXES
from quire.engine.checkpoint.files import ModelConfig


def base_decoder_spec(config: ModelConfig, norm_offset: float = 0.0) -> DecoderSpec:
    """What every family begins with: full attention, rotated, and a gated MLP; no biases."""
    heads, norm = (config.num_heads, config.num_kv_heads, config.head_dim), NormSpec(config.norm_eps, norm_offset)
    mrope_section = AXES.get(config.model_type)
    axes = None if mrope_section is None else parse_mrope_axes(config.rope, config.head_dim, mrope_section)
    layer = (
        AttentionLayerSpec(*heads, scale=config.head_dim**-0.5, rope=config.rope, norm=norm, mrope_axes=axes),
        MLPSpec(config.intermediate_size, norm),
    )
    shape = (config.vocab_size, config.hidden_size)
    return DecoderSpec(*shape, (layer,) * config.num_layers, norm, tie_embeddings=config.tie_embeddings)
