from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from quire.engine.architecture.rope import ROPE_TYPES, parse_mrope_axes
from quire.engine.families.base.config_fields import ConfigReader
from quire.engine.families.base.layer_types import sliding_windows
from quire.engine.families.base.model_config import ModelConfig
from quire.engine.families.base.schema.config_schema import (
    LONGROPE_TYPES,
    MAX_POSITIONS,
    FamilyConfigFields,
    RopeFields,
)

_TRAINED_CONTEXT_TYPES = ("llama3", "yarn", *LONGROPE_TYPES)
_PARTIAL_ROTARY_FIELD = "partial_rotary_factor"
_LONGROPE_TRAINED_CONTEXT = 4096
_CONTEXT_DEPENDENT_TYPES = ("longrope", "su", "dynamic")


def read_rope_parameters(raw: FamilyConfigFields, *, has_partial_rotary: bool, has_longrope: bool) -> dict[str, Any]:
    """Normalize like transformers' `standardize_rope_params`. transformers 4 writes rope_theta next to rope_scaling,
    transformers 5 both into rope_parameters; rope_scaling wins.
    """
    file_rope = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    rope: dict[str, Any] = {key: value for key, value in file_rope.items() if value is not None}
    if (theta := raw.get("rope_theta")) is None:
        theta = 10_000.0
    rope.setdefault("rope_theta", theta)
    rope["rope_type"] = rope.get("rope_type") or rope.pop("type", None) or "default"
    rope["rope_type"] = "default" if rope["rope_type"] == "mrope" else rope["rope_type"]
    for name in (_PARTIAL_ROTARY_FIELD, "rotary_dim"):
        if (value := raw.get(name)) is not None:
            rope.setdefault(name, value)
    if not has_partial_rotary:
        rope.pop(_PARTIAL_ROTARY_FIELD, None)
    if rope["rope_type"] in _TRAINED_CONTEXT_TYPES:
        _fill_trained_context(rope, raw, has_longrope=has_longrope)
    return rope


def _fill_trained_context(rope: dict[str, Any], raw: FamilyConfigFields, *, has_longrope: bool) -> None:
    """A top-level field overrides the object's."""
    name, positions = "original_max_position_embeddings", raw.get("max_position_embeddings")
    if (top_level_value := raw.get(name)) is not None:
        rope[name] = top_level_value
    elif name not in rope and has_longrope:
        rope[name] = _LONGROPE_TRAINED_CONTEXT
    elif name not in rope and positions is not None:
        rope[name] = positions
    if (
        rope["rope_type"] in ("yarn", *LONGROPE_TYPES)
        and "factor" not in rope
        and positions is not None
        and name in rope
    ):
        rope["factor"] = positions / rope[name]


def read_max_position(raw: FamilyConfigFields, rope: Mapping[str, Any]) -> int:
    """YaRN may extend config.json's, as Qwen advises."""
    config_positions = raw.get("max_position_embeddings") or 2048
    if rope["rope_type"] != "yarn":
        return config_positions
    return max(
        config_positions,
        min(int(rope.get("factor", 1) * rope.get("original_max_position_embeddings", 1)), MAX_POSITIONS),
    )


def rope_depends_on_context(rope_fields: Mapping[str, Any]) -> bool:
    kinds = (rope_fields.get(name) for name in ("rope_type", "type"))
    inner = (each for each in rope_fields.values() if isinstance(each, Mapping))
    return any(kind in _CONTEXT_DEPENDENT_TYPES for kind in kinds if isinstance(kind, str)) or any(
        map(rope_depends_on_context, inner)
    )


def find_unsupported_rope_type(rope: Mapping[str, Any], *, has_longrope: bool) -> str:
    """Empty if it is supported."""
    kind = str(rope.get("rope_type") or rope.get("type") or "default")
    served = {"mrope": True, "longrope": has_longrope, "su": has_longrope}.get(kind, kind in ROPE_TYPES)
    return "" if served else kind


def build_layer_type_rope(fields: RopeFields | None, theta: float, positions: int | None) -> dict[str, Any]:
    rope: dict[str, Any] = {"rope_theta": theta}
    rope |= {key: value for key, value in (fields or {}).items() if value is not None}
    rope["rope_type"] = rope.get("rope_type") or rope.pop("type", None) or "default"
    if rope["rope_type"] in ("llama3", "yarn") and positions is not None:
        rope.setdefault("original_max_position_embeddings", positions)
    return rope


def mrope_axes_reader(interleaved_sections: tuple[int, ...]) -> ConfigReader:
    """Reads AttentionLayerSpec.mrope_axes. (): three consecutive sections; otherwise interleaved sections of these
    default sizes.
    """
    return lambda config: [parse_mrope_axes(config.rope, config.head_dim, interleaved_sections)] * config.num_layers


def ropes_by_window_reader(full: ConfigReader, sliding: ConfigReader) -> ConfigReader:
    """Only layers without a window may have scaled RoPE. `full` and `sliding` read the default rope_theta."""

    def read_ropes(config: ModelConfig) -> list[dict[str, Any]]:
        ropes, scaling = config.raw.get("rope_parameters") or {}, config.raw.get("rope_scaling") or {}
        full_fields, positions = (
            {**(ropes.get("full_attention") or {}), **scaling},
            config.raw.get("max_position_embeddings"),
        )
        full_rope = build_layer_type_rope(cast(RopeFields, full_fields), full(config), positions)
        sliding_rope = build_layer_type_rope(ropes.get("sliding_attention"), sliding(config), positions)
        return [full_rope if window is None else sliding_rope for window in sliding_windows(config)]

    return read_ropes


def window_only_ropes(config: ModelConfig) -> list[dict[str, Any] | None]:
    return [None if window is None else config.rope for window in sliding_windows(config)]


def periodic_nope_ropes(config: ModelConfig) -> list[dict[str, Any] | None]:
    """One in every few layers has no RoPE (NoPE: Yang et al., 2025)."""
    every, layers = config.raw.get("no_rope_layer_interval") or 4, config.num_layers
    uses_rope = config.raw.get("no_rope_layers") or [int((layer + 1) % every != 0) for layer in range(layers)]
    return [config.rope if is_rotated else None for is_rotated in uses_rope]


def longrope_parameters(config: ModelConfig) -> dict[str, Any]:
    raw, rope = config.raw, dict(config.rope)
    if rope["rope_type"] not in LONGROPE_TYPES:
        return rope
    original_context = rope["original_max_position_embeddings"]
    trained_context = raw.get("max_position_embeddings") or config.max_position
    return rope | {
        "rope_type": "longrope",
        "original_max_position_embeddings": original_context,
        "max_position_embeddings": config.rope_context or config.max_model_len or config.max_position,
        "factor": rope.get("factor") or trained_context / original_context,
    }
