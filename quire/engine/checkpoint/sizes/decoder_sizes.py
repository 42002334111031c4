from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from quire.engine.architecture.attention import AttentionLayerSpec
from quire.engine.architecture.decoder import EMBED_POSITIONS, EMBED_TOKENS, LM_HEAD, DecoderSpec
from quire.engine.architecture.kv_cache_spec import PIECE, LayerStates, PagedColumnState, PagedState
from quire.engine.architecture.mla import MLALayerSpec
from quire.engine.architecture.moe import MoELayerSpec
from quire.engine.architecture.parameter_shapes import count_parameters
from quire.engine.architecture.recurrent import MatrixStateSpec
from quire.engine.architecture.shared_transformer import SharedTransformerSpec
from quire.engine.architecture.stream import EMBED_TOKENS_PER_LAYER

AttentionSublayerSpec = AttentionLayerSpec | MLALayerSpec
_TABLE_WEIGHTS = tuple(f"{name}.weight" for name in (EMBED_TOKENS, EMBED_POSITIONS, EMBED_TOKENS_PER_LAYER, LM_HEAD))


@dataclass(frozen=True, kw_only=True, slots=True)
class DecoderSizes:
    """Counts of parameters or cached values, not bytes."""

    num_layers: int
    vocab_size: int
    num_parameters: int
    embedding_parameters: int
    """Embedding and head, which are never quantized. A tied head counts once."""
    num_experts: int
    """Routed experts per layer; 0 without experts."""
    experts_per_token: int
    expert_parameters: int
    head_parameters: int
    kv_formula: str
    num_heads: int
    num_kv_heads: int
    """Most devices that the KV cache can be split over; 1 with MLA."""
    head_dim: int
    """Elements of a cached key per head; with MLA, everything cached."""
    attention_width: int
    """Query heads times head size, over all layers."""
    layer_cache_specs: tuple[LayerStates, ...]
    conv_state_formula: str = ""
    reread_parameters: int = 0


def count_decoder_sizes(spec: DecoderSpec) -> DecoderSizes:
    shapes = spec.parameter_shapes()
    hidden = spec.hidden_size
    moe_layers = spec.sublayers_of_kind(MoELayerSpec)
    attention_layers = _attention_sublayers(spec)
    caching_layers = [each for each in attention_layers if isinstance(each.kv_cache_spec, PagedState)]
    state_heads = [each.num_heads for layer in spec.layers for each in layer if isinstance(each, MatrixStateSpec)]
    return DecoderSizes(
        num_layers=spec.num_layers,
        vocab_size=spec.vocab_size,
        num_parameters=count_parameters(shapes),
        embedding_parameters=count_parameters({name: shapes[name] for name in _TABLE_WEIGHTS if name in shapes}),
        num_experts=max((each.num_experts for each in moe_layers), default=0),
        experts_per_token=max((each.routing.top_k for each in moe_layers), default=0),
        expert_parameters=sum(count_parameters(each.expert_shapes("", hidden)) for each in moe_layers),
        head_parameters=spec.vocab_size * hidden,
        kv_formula=" + ".join(
            f"{kind} x {count} layers" for kind, count in _count_layers_by_kv_formula(caching_layers).items()
        ),
        num_heads=max([each.num_heads for each in attention_layers] or state_heads, default=1),
        num_kv_heads=min([each.num_kv_heads for each in caching_layers] or state_heads, default=1),
        head_dim=max((each.head_dim for each in caching_layers), default=0),
        attention_width=sum(_attention_width(each) for each in attention_layers),
        layer_cache_specs=tuple(spec.layer_cache_specs),
        conv_state_formula=_conv_state_formula(spec),
        reread_parameters=_count_reread_parameters(spec),
    )


def _attention_sublayers(spec: DecoderSpec) -> list[AttentionSublayerSpec]:
    sublayers = list[AttentionSublayerSpec]()
    for layer in spec.layers:
        for sublayer in layer:
            if isinstance(sublayer, SharedTransformerSpec):
                sublayers.append(sublayer.attention)
            elif isinstance(sublayer, AttentionLayerSpec | MLALayerSpec):
                sublayers.append(sublayer)
    return sublayers


def _count_layers_by_kv_formula(layers: list[AttentionSublayerSpec]) -> Counter[str]:
    return Counter(
        f"({each.kv_lora_rank} latent + {each.qk_rope_head_dim} rope)"
        if isinstance(each, MLALayerSpec)
        else f"2 x {each.num_kv_heads} heads x {each.head_dim}"
        for each in layers
    )


def _attention_width(layer: AttentionSublayerSpec) -> int:
    """MLA counts the mean of keys and values."""
    if isinstance(layer, MLALayerSpec):
        return layer.num_heads * (layer.qk_rope_head_dim + layer.qk_nope_head_dim + layer.v_head_dim) // 2
    return layer.num_heads * layer.head_dim


def _conv_state_formula(spec: DecoderSpec) -> str:
    layer_counts = Counter(
        (each.columns, each.channels) for each in spec.kv_cache_specs if isinstance(each, PagedColumnState)
    )
    return " + ".join(
        f"{count} columns x {channels} / {PIECE} x {layers} layers"
        for (count, channels), layers in layer_counts.items()
    )


def _count_reread_parameters(spec: DecoderSpec) -> int:
    hidden, total = spec.hidden_size, 0
    for index, layer in enumerate(spec.layers):
        for sublayer in layer:
            if isinstance(sublayer, SharedTransformerSpec) and sublayer.weights_layer != index:
                own = sublayer.parameter_shapes(f"model.layers.{index}", hidden)
                first = sublayer.parameter_shapes(f"model.layers.{sublayer.weights_layer}", hidden)
                total += count_parameters(first) - count_parameters(own) + 2 * hidden
    return total
