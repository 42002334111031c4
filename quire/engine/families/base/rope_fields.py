from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.engine.architecture.rope import ROPE_TYPES, parse_mrope_axes
from quire.engine.families.base.config_fields import ConfigReader
from quire.engine.families.base.layer_types import sliding_windows
from quire.engine.families.base.model_config import ModelConfig
from quire.engine.families.base.schema.config_schema import (
    LONGROPE_TYPES,
    MAX_POSITIONS,
    FamilyConfigFields,
)

_TRAINED_CONTEXT_TYPES = ("llama3", "yarn", *LONGROPE_TYPES)
_PARTIAL_ROTARY_FIELD = "partial_rotary_factor"
_TRAINED_CONTEXT_FIELD = "original_max_position_embeddings"
_LONGROPE_TRAINED_CONTEXT = 4096
"""In tokens, for LongRoPE models without _TRAINED_CONTEXT_FIELD."""
_CONTEXT_DEPENDENT_TYPES = ("longrope", "su", "dynamic")
"""transformers' classes compute their frequencies from the longest context."""


def rope_object(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return one set of RoPE parameters, or one set per layer type. transformers 4 writes rope_theta next to an object
    rope_scaling, transformers 5 writes both into rope_parameters. If a file has both objects, rope_scaling counts.
    """
    rope = fields.get("rope_scaling") or fields.get("rope_parameters")
    return rope if isinstance(rope, Mapping) else {}


def rope_types(fields: Mapping[str, Any]) -> set[str]:
    rope = rope_object(fields)
    return {_rope_type(each) or "default" for each in (rope, *rope.values()) if isinstance(each, Mapping)}


def _rope_type(rope: Mapping[str, Any]) -> str:
    """Qwen's mrope is the default type with several positions per token."""
    kind = str(rope.get("rope_type") or rope.get("type") or "")
    return "default" if kind == "mrope" else kind


def normalize_rope(
    rope_fields: Mapping[str, Any] | None,
    defaults: Mapping[str, Any],
    positions: int | None,
    *,
    trained_context: int | None = None,
    default_trained_context: int | None = None,
) -> dict[str, Any]:
    """Adds rope_type and the context length of training, like transformers' `standardize_rope_params`.

    `defaults` has rope_theta and other fields that `rope_fields` may omit. `trained_context` overrides `rope_fields`.
    """
    rope = {**defaults, **{key: value for key, value in (rope_fields or {}).items() if value is not None}}
    rope["rope_type"] = _rope_type(rope_fields or {}) or rope.get("rope_type") or "default"
    rope.pop("type", None)
    if rope["rope_type"] not in _TRAINED_CONTEXT_TYPES:
        return rope
    context = trained_context or rope.get(_TRAINED_CONTEXT_FIELD) or default_trained_context or positions
    if context is not None:
        rope[_TRAINED_CONTEXT_FIELD] = context
        if rope["rope_type"] != "llama3" and positions is not None:
            rope.setdefault("factor", positions / context)
    return rope


def read_rope_parameters(raw: FamilyConfigFields, *, has_partial_rotary: bool, has_longrope: bool) -> dict[str, Any]:
    """Return the parameters that all layers share."""
    rope_fields = dict(rope_object(raw))
    rope_fields["rope_theta"] = rope_fields.get("rope_theta") or raw.get("rope_theta") or 10_000.0
    rope = normalize_rope(
        rope_fields,
        {},
        raw.get("max_position_embeddings"),
        trained_context=raw.get("original_max_position_embeddings"),
        default_trained_context=_LONGROPE_TRAINED_CONTEXT if has_longrope else None,
    )
    for name in (_PARTIAL_ROTARY_FIELD, "rotary_dim"):
        if (value := raw.get(name)) is not None:
            rope.setdefault(name, value)
    if not has_partial_rotary:
        rope.pop(_PARTIAL_ROTARY_FIELD, None)
    return rope


def read_max_position(raw: FamilyConfigFields, rope: Mapping[str, Any]) -> int:
    """YaRN's extended context counts if longer, as Qwen advises."""
    config_positions = raw.get("max_position_embeddings") or 2048
    if rope["rope_type"] != "yarn":
        return config_positions
    return max(
        config_positions,
        min(int(rope.get("factor", 1) * rope.get("original_max_position_embeddings", 1)), MAX_POSITIONS),
    )


def rope_depends_on_context(fields: Mapping[str, Any], *, by_transformers: bool, has_longrope: bool) -> bool:
    if by_transformers:
        return not rope_types(fields).isdisjoint(_CONTEXT_DEPENDENT_TYPES)
    return has_longrope and not rope_types(fields).isdisjoint(LONGROPE_TYPES)


def unsupported_rope_types(fields: Mapping[str, Any], *, has_longrope: bool) -> list[str]:
    supported = {*ROPE_TYPES, "su"} if has_longrope else {*ROPE_TYPES} - {"longrope"}
    return sorted(rope_types(fields) - supported)


def mrope_axes_reader(interleaved_sections: tuple[int, ...]) -> ConfigReader:
    """See parse_mrope_axes."""
    return lambda config: [parse_mrope_axes(config.rope, config.head_dim, interleaved_sections)] * config.num_layers


def ropes_by_window_reader(full: ConfigReader, sliding: ConfigReader) -> ConfigReader:
    """Only layers without a window may have scaled RoPE. `full` and `sliding` read the default rope_theta."""

    def read_ropes(config: ModelConfig) -> list[dict[str, Any]]:
        raw = config.raw
        ropes, scaling = raw.get("rope_parameters") or {}, raw.get("rope_scaling") or {}
        full_fields = {**(ropes.get("full_attention") or {}), **scaling}
        positions = raw.get("max_position_embeddings")
        full_rope = normalize_rope(full_fields, {"rope_theta": full(config)}, positions)
        sliding_rope = normalize_rope(ropes.get("sliding_attention"), {"rope_theta": sliding(config)}, positions)
        return [full_rope if window is None else sliding_rope for window in sliding_windows(config)]

    return read_ropes


def window_only_ropes(config: ModelConfig) -> list[dict[str, Any] | None]:
    return [None if window is None else config.rope for window in sliding_windows(config)]


def periodic_nope_ropes(config: ModelConfig) -> list[dict[str, Any] | None]:
    """Return None for layers without RoPE, by default every fourth (NoPE: Yang et al., 2025)."""
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
