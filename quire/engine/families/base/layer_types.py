from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from quire.engine.architecture.norm import NormSpec
from quire.engine.architecture.sublayer import SublayerSpec
from quire.engine.families.base.config_fields import ConfigReader
from quire.engine.families.base.model_config import ModelConfig
from quire.engine.families.base.schema.config_schema import MAX_LAYERS

SublayerReader = Callable[[ModelConfig, NormSpec], SublayerSpec]


def layer_windows(text_fields: Mapping[str, Any], num_layers: int) -> tuple[int | None, ...]:
    """In tokens, per attention layer; None if unlimited."""
    window = text_fields.get("sliding_window") or None
    if not text_fields.get("use_sliding_window", True):
        window = None
    kinds = text_fields.get("layer_types") or text_fields.get("layers_block_type")
    if kinds:
        attention_kinds = [each for each in kinds if _has_attention(each)]
        return tuple(window if "sliding" in each or "chunked" in each else None for each in attention_kinds)
    pattern = text_fields.get("sliding_window_pattern")
    if isinstance(pattern, str):
        return tuple(window if pattern[layer % len(pattern)] == "L" else None for layer in range(num_layers))
    if isinstance(pattern, int) and pattern:
        return tuple(window if layer % pattern else None for layer in range(1, num_layers + 1))
    return (window,) * num_layers


def upper_layer_windows(text_fields: Mapping[str, Any], num_layers: int) -> tuple[int | None, ...]:
    """Without listed layer types, layers from max_window_layers on have windows."""
    windows = layer_windows(text_fields, num_layers)
    if (
        text_fields.get("layer_types")
        or text_fields.get("layers_block_type")
        or text_fields.get("sliding_window_pattern")
    ):
        return windows
    first = text_fields.get("max_window_layers")
    first = num_layers if first is None else int(first)
    return tuple(window if layer >= first else None for layer, window in enumerate(windows))


def unserved_layer_windows(text_fields: Mapping[str, Any], num_layers: int) -> tuple[int | None, ...]:
    has_lower_layers = text_fields.get("max_window_layers") is not None
    return (upper_layer_windows if has_lower_layers else layer_windows)(text_fields, num_layers)


def _has_attention(kind: str) -> bool:
    return kind == "hybrid" or ("attention" in kind and "linear" not in kind)


def sliding_windows(config: ModelConfig) -> tuple[int | None, ...]:
    return layer_windows(config.raw, config.num_layers)


def upper_sliding_windows(config: ModelConfig) -> tuple[int | None, ...]:
    return upper_layer_windows(config.raw, config.num_layers)


def hybrid_mixers_reader(
    read_sublayer: SublayerReader, *, kinds: Sequence[str] = ("linear_attention",)
) -> Callable[[ModelConfig, NormSpec], Sequence[SublayerSpec | None]]:
    def read_mixers(config: ModelConfig, norm: NormSpec) -> Sequence[SublayerSpec | None]:
        mixer = read_sublayer(config, norm)
        return [mixer if kind in kinds else None for kind in config.raw.get("layer_types") or ()]

    return read_mixers


def attention_layer_values_reader(
    values: Callable[[ModelConfig], Sequence[Any]], *, other_kinds: Sequence[str]
) -> ConfigReader:
    """`values` has only attention layers. Layers of `other_kinds` get None."""

    def read_by_layer(config: ModelConfig) -> list[Any]:
        attention_values = iter(values(config))
        return [None if kind in other_kinds else next(attention_values) for kind in config.raw.get("layer_types") or ()]

    return read_by_layer


def fill_layer_types(fields: dict[str, Any], kind_of: Callable[[int], str]) -> None:
    """`kind_of` gets layer indices from 0."""
    layers = fields.get("num_hidden_layers")
    if not fields.get("layer_types") and isinstance(layers, int) and 1 <= layers <= MAX_LAYERS:
        fields["layer_types"] = [kind_of(layer) for layer in range(layers)]
