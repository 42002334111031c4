"""The sizes of a decoder, counted from its spec."""

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
    """What follows from a decoder's layers, counted in numbers (parameters or cached values), not in bytes."""

    num_layers: int
    vocab_size: int
    num_parameters: int
    embedding_parameters: int
    """The part of `num_parameters` in the embedding and the output head, which are never quantized. A tied head, which
    shares the embedding's weights, is counted once."""
    num_experts: int
    """Routed experts per layer; 0 when no layer has experts."""
    experts_per_token: int
    expert_parameters: int
    """The part of `num_parameters` in the routed experts of all layers, without the shared experts."""
    head_parameters: int
    """Parameters of the output head, tied or not."""
    kv_formula: str
    """How kv_values_per_token comes about, for people to read."""
    num_heads: int
    """Query heads of a layer, which the devices that share the model divide among them."""
    num_kv_heads: int
    """The largest number of devices that the KV cache can be split over; 1 with latent attention."""
    head_dim: int
    """Numbers of a cached key per head; the whole of what latent attention caches."""
    attention_width: int
    """Query heads times head size, summed over the layers that have attention."""
    layer_cache_specs: tuple[LayerStates, ...]
    """By layer; an encoder's keep nothing."""
    conv_state_formula: str = ""
    """How conv_values_per_token comes about; "" where it is 0."""
    reread_parameters: int = 0
    """Parameters that a step reads beyond the first time, where layers share some."""


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
    """In the order of the layers, those of shared blocks among them."""
    sublayers = list[AttentionSublayerSpec]()
    for layer in spec.layers:
        for sublayer in layer:
            if isinstance(sublayer, SharedTransformerSpec):
                sublayers.append(sublayer.attention)
            elif isinstance(sublayer, AttentionLayerSpec | MLALayerSpec):
                sublayers.append(sublayer)
    return sublayers


def _count_layers_by_kv_formula(layers: list[AttentionSublayerSpec]) -> Counter[str]:
    """How many layers cache so many numbers of a token, for people to read."""
    return Counter(
        f"({each.kv_lora_rank} latent + {each.qk_rope_head_dim} rope)"
        if isinstance(each, MLALayerSpec)
        else f"2 x {each.num_kv_heads} heads x {each.head_dim}"
        for each in layers
    )


def _attention_width(layer: AttentionSublayerSpec) -> int:
    """Query heads times head size; of latent attention the mean of keys and values."""
    if isinstance(layer, MLALayerSpec):
        return layer.num_heads * (layer.qk_rope_head_dim + layer.qk_nope_head_dim + layer.v_head_dim) // 2
    return layer.num_heads * layer.head_dim


def _conv_state_formula(spec: DecoderSpec) -> str:
    """Of what pages keep of convolutions; "": nothing."""
    layer_counts = Counter(
        (each.columns, each.channels) for each in spec.kv_cache_specs if isinstance(each, PagedColumnState)
    )
    return " + ".join(
        f"{count} columns x {channels} / {PIECE} x {layers} layers"
        for (count, channels), layers in layer_counts.items()
    )


def _count_reread_parameters(spec: DecoderSpec) -> int:
    """Parameters that a step reads beyond the first time, where layers share some."""
    hidden, total = spec.hidden_size, 0
    for index, layer in enumerate(spec.layers):
        for sublayer in layer:
            if isinstance(sublayer, SharedTransformerSpec) and sublayer.weights_layer != index:
                own = sublayer.parameter_shapes(f"model.layers.{index}", hidden)
                first = sublayer.parameter_shapes(f"model.layers.{sublayer.weights_layer}", hidden)
                total += count_parameters(first) - count_parameters(own) + 2 * hidden
    return total
