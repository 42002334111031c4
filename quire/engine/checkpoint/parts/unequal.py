"""Layers of Gemma 4 (Google, 2026), which differ in the size of heads, share keys and values, and more: what its
config.json says of each. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quire.engine.errors import ModelError

KINDS = ("gemma4_text",)
_MOST_LAYERS = 4096


@dataclass(frozen=True, slots=True)
class UnequalLayer:
    heads: int
    kv_heads: int
    head_dim: int
    window: int | None
    """Keys a query sees; None: all."""
    source: int | None
    """The layer whose keys and values it reads; None: it has its own."""
    keys_are_values: bool
    inner: int
    """Of its MLP."""


def complete(found: dict[str, Any]) -> None:
    """Put into a config.json's content, by Llama's names, what it leaves out."""
    layers = found.get("num_hidden_layers")
    if isinstance(layers, int) and 1 <= layers <= _MOST_LAYERS:
        kinds = ("full_attention", "sliding_attention")
        given = found.get("layer_types") or [kinds[layer % 6 != 0] for layer in range(1, layers + 1)]
        if isinstance(given, list):
            found["layer_types"] = [*given[:-1], "full_attention"]
    if not found.get("enable_moe_block"):
        found["num_experts"] = found["num_experts_per_tok"] = None


def unequal_layers(text: Mapping[str, Any]) -> list[UnequalLayer]:
    """By layer, of a content that is complete. Raises ModelError."""
    kinds, count = list(text.get("layer_types") or ()), _number(text, "num_hidden_layers")
    if len(kinds) != count:
        raise ModelError(f"model: config.json: layer_types: {len(kinds)} entries for {count} layers")
    shared = _number(text, "num_kv_shared_layers")
    if shared >= count:
        raise ModelError(
            f"model: config.json: num_kv_shared_layers: {shared} of {count} layers leave none to read from"
        )
    own, wide = kinds[: count - shared], bool(text.get("use_double_wide_mlp"))
    found = list[UnequalLayer]()
    for layer, kind in enumerate(kinds):
        sliding, source = "sliding" in kind, None
        if layer >= len(own):
            if kind not in own:
                raise ModelError(f"model: config.json: num_kv_shared_layers: no layer has keys for a {kind}")
            source = len(own) - 1 - own[::-1].index(kind)
        kv_heads, head_dim = _heads(text, layer, full=not sliding)
        found.append(
            UnequalLayer(
                heads=_number(text, "num_attention_heads"),
                kv_heads=kv_heads,
                head_dim=head_dim,
                window=_number(text, "sliding_window") or None if sliding else None,
                source=source,
                keys_are_values=bool(text.get("attention_k_eq_v")) and not sliding,
                inner=_number(text, "intermediate_size") * (2 if wide and source is not None else 1),
            )
        )
    return found


def _number(text: Mapping[str, Any], name: str) -> int:
    """A field's value, 0 where it has none. Raises ModelError for what a plan reads of other families, a list."""
    value = text.get(name) or 0
    if not isinstance(value, int) or value < 0:
        raise ModelError(f"model: config.json: {name}: expected int >= 0, got {str(value)[:40]}")
    return value


def _heads(text: Mapping[str, Any], layer: int, *, full: bool) -> tuple[int, int]:
    """Key-value heads of a layer, and the size of its heads. Raises ModelError."""
    kv_heads, head_dim = _number(text, "num_key_value_heads"), _number(text, "head_dim")
    if (each := text.get("per_layer_config")) is not None:
        own = _of_layer(each, layer)
        kv_heads, head_dim = own.get("num_key_value_heads") or kv_heads, own.get("head_dim") or head_dim
    elif full:
        head_dim = int(text.get("global_head_dim") or 512)
        kv_heads = int((text.get("attention_k_eq_v") and text.get("num_global_key_value_heads")) or kv_heads)
    if head_dim % 2:
        raise ModelError(
            f"model: config.json: head_dim: a head must have an even size, got {head_dim} in layer {layer}"
        )
    if _number(text, "num_attention_heads") % kv_heads:
        heads = text["num_attention_heads"]
        apart = f"{kv_heads} in layer {layer} do not divide the {heads} query heads"
        raise ModelError(f"model: config.json: num_key_value_heads: {apart}")
    return kv_heads, head_dim


def _of_layer(each: Mapping[str, Any], layer: int) -> Mapping[str, Any]:
    """A layer's entry; its key is the layer's number, which may begin with zeros. Raises ModelError."""
    for key, own in each.items():
        if not (number := str(key)).isdecimal():
            raise ModelError(f"model: config.json: per_layer_config: {number[:40]!r} is no layer's number")
        if int(number) == layer:
            return own or {}
    return {}
