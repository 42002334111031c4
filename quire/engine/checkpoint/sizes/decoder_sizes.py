from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, fields
from typing import Any

from quire.engine.architecture.attention import AttentionLayerSpec
from quire.engine.architecture.decoder import DecoderSpec
from quire.engine.architecture.kv_cache_spec import HASH_BLOCK_SIZE, LayerKVCacheSpecs, ShortConvStateSpec
from quire.engine.architecture.mla import MLALayerSpec
from quire.engine.architecture.parameter_shapes import count_parameters
from quire.engine.architecture.recurrent import MatrixStateSpec
from quire.engine.architecture.shared_transformer import SharedTransformerSpec
from quire.engine.architecture.sublayer import StepCosts


@dataclass(frozen=True, kw_only=True, slots=True)
class DecoderSizes(StepCosts):
    """Numbers of parameters or cached values, not bytes."""

    num_layers: int
    vocab_size: int
    hidden_size: int
    num_parameters: int
    embedding_parameters: int
    """Counts a tied head once."""
    kv_formula: str
    num_heads: int
    num_kv_heads: int
    """Maximum number of devices that can divide the KV cache; 1 with MLA."""
    head_dim: int
    """Elements of a cached key per head. With MLA, all cached elements."""
    layer_cache_specs: tuple[LayerKVCacheSpecs, ...]
    """Layers of an encoder that caches nothing have a FullAttentionSpec of 0 elements per token."""
    conv_state_formula: str = ""
    """Values that convolutions cache per token, for users; "" if none."""
    gpu_error: str | None = None
    quantized_kv_error: str | None = None


def field_values(costs: StepCosts) -> dict[str, Any]:
    return {each.name: getattr(costs, each.name) for each in fields(costs)}


def count_decoder_sizes(spec: DecoderSpec) -> DecoderSizes:
    costs = spec.step_costs()
    sublayers = [each for layer in spec.layers for each in layer]
    attention = [
        each for each in sublayers if isinstance(each, AttentionLayerSpec | MLALayerSpec | SharedTransformerSpec)
    ]
    caching = [each for each in attention if each.kv_formula]
    state_heads = [each.num_heads for each in sublayers if isinstance(each, MatrixStateSpec)]
    kv_formulas = Counter(each.kv_formula for each in caching)
    return DecoderSizes(
        **field_values(costs),
        num_layers=spec.num_layers,
        vocab_size=spec.vocab_size,
        hidden_size=spec.hidden_size,
        num_parameters=count_parameters(spec.parameter_shapes()),
        embedding_parameters=spec.table_parameters() + (0 if spec.tie_embeddings else costs.head_parameters),
        kv_formula=" + ".join(f"{formula} x {count} layers" for formula, count in kv_formulas.items()),
        num_heads=max([each.num_heads for each in attention] or state_heads, default=1),
        num_kv_heads=min([each.num_kv_heads for each in caching] or state_heads, default=1),
        head_dim=max((each.head_dim for each in caching), default=0),
        layer_cache_specs=tuple(spec.layer_cache_specs),
        conv_state_formula=_conv_state_formula(spec),
        gpu_error=spec.gpu_error,
        quantized_kv_error=spec.quantized_kv_error,
    )


def _conv_state_formula(spec: DecoderSpec) -> str:
    layer_counts = Counter(
        (each.columns, each.channels) for each in spec.kv_cache_specs if isinstance(each, ShortConvStateSpec)
    )
    return " + ".join(
        f"{count} columns x {channels} / {HASH_BLOCK_SIZE} x {layers} layers"
        for (count, channels), layers in layer_counts.items()
    )
