"""Granite with sliding windows (IBM, 2026): RoPE per layer or none, and attention sinks."""

from __future__ import annotations

from typing import Any

from quire.engine.common.errors import ModelError
from quire.engine.families.base import ModelConfig, sliding_windows
from quire.engine.families.granite import GRANITE


def _layer_ropes(config: ModelConfig) -> list[dict[str, Any] | None]:
    raw, layers = config.raw, config.num_layers
    thetas = raw.get("layer_rope_theta") or [config.rope["rope_theta"]] * layers
    if not raw.get("layer_types"):
        raise ModelError("model: config.json of a 'granite_swa' lacks layer_types, needed to know its windows")
    if len(thetas) != layers or any(0 < theta < 1 for theta in thetas):
        raise ModelError(
            f"model: config.json: layer_rope_theta: {len(thetas)} entries, 0 or from 1 on, for {layers} layers"
        )
    return [config.rope | {"rope_theta": theta} if theta else None for theta in thetas]


GRANITE_SWA = GRANITE.derive(
    "granite_swa",
    defaults={"tie_word_embeddings": True, "rms_norm_eps": 1e-05, "max_position_embeddings": 8192},
    missing_defaults={"num_key_value_heads": 4, "sliding_window": 128},
    attention={"rope": _layer_ropes, "window": sliding_windows, "sinks": True},
)
