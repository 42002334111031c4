"""Blocks of attention and MLP whose weights several layers share (Zamba 2): which layer has which, and how many
parameters they are. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

KINDS = ("zamba2",)
MOST_USES = 64
"""Whose own linears a checkpoint's layout knows by name (engine/checkpoint/layouts.py)."""
Shapes = dict[str, tuple[int, int]]


class Use(NamedTuple):
    layer: int
    home: int
    """The layer that has the block's weights: the first one that uses it."""


def uses_of(text: Mapping[str, Any]) -> list[Use]:
    """In the layers' order; blocks take turns."""
    layers = [layer for layer, kind in enumerate(text.get("layer_types") or ()) if kind == "hybrid"]
    blocks = max(int(text.get("num_mem_blocks") or 1), 1)
    return [Use(layer, layers[number % blocks]) for number, layer in enumerate(layers)]


_HEADS = ("num_attention_heads", "num_key_value_heads")


def _head(text: Mapping[str, Any], hidden: int) -> int:
    return int(text.get("head_dim") or 2 * hidden // max(int(text.get("num_attention_heads") or 1), 1))
