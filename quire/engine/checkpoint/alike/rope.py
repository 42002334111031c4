"""What config.json says of rotary embeddings and of positions, in one form."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.engine.checkpoint.families import PHI
from quire.engine.checkpoint.fields import LONGROPE, MAX_POSITIONS, ServedFields

_OF_TRAINED_POSITIONS = ("llama3", "yarn", *LONGROPE)
"""Rope types that depend on the context of training."""
_PART = "partial_rotary_factor"
_ROTATED_IN_PART = {
    "bamba",
    "gemma4_text",
    "glm",
    "glm4",
    "glm4_moe",
    "gpt_neox",
    "lfm3",
    "mellum",
    "minimax_m2",
    "nemotron",
    "phi",
    "phi3",
    "qwen3_5_moe_text",
    "qwen3_5_text",
    "qwen3_next",
    "solar_open",
    "stablelm",
}
"""Families that rotate a part of each head; other classes of transformers do not read partial_rotary_factor."""
_PHI_POSITIONS = 4096
"""That context where a Phi-3's config.json does not say it."""
_BY_CONTEXT = ("longrope", "su", "dynamic")
"""What transformers' classes choose by the longest context."""


def rope_of(raw: ServedFields) -> dict[str, Any]:
    """The rotary embedding's parameters, as one object with both rope_theta and rope_type, normalized as by
    transformers (`standardize_rope_params`).

    Files of transformers 4 have rope_theta beside an object rope_scaling, those of transformers 5 both in
    rope_parameters; a file with both objects means rope_scaling.
    """
    given = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    rope: dict[str, Any] = {key: value for key, value in given.items() if value is not None}
    if (theta := raw.get("rope_theta")) is None:
        theta = 10_000.0
    rope.setdefault("rope_theta", theta)
    rope["rope_type"] = rope.get("rope_type") or rope.pop("type", None) or "default"
    rope["rope_type"] = "default" if rope["rope_type"] == "mrope" else rope["rope_type"]
    for name in (_PART, "rotary_dim"):
        if (value := raw.get(name)) is not None:
            rope.setdefault(name, value)
    if raw.get("model_type") not in _ROTATED_IN_PART:
        rope.pop(_PART, None)
    if rope["rope_type"] in _OF_TRAINED_POSITIONS:
        _complete_trained_positions(rope, raw)
    return rope


def _complete_trained_positions(rope: dict[str, Any], raw: ServedFields) -> None:
    """The context before it was stretched: a field beside the object counts before one in it."""
    name, positions = "original_max_position_embeddings", raw.get("max_position_embeddings")
    if (outside := raw.get(name)) is not None:
        rope[name] = outside
    elif name not in rope and raw.get("model_type") in PHI:
        rope[name] = _PHI_POSITIONS
    elif name not in rope and positions is not None:
        rope[name] = positions
    if rope["rope_type"] in ("yarn", *LONGROPE) and "factor" not in rope and positions is not None and name in rope:
        rope["factor"] = positions / rope[name]


def positions_of(raw: ServedFields, rope: Mapping[str, Any]) -> int:
    """Positions of the model. YaRN's may be more than config.json says where it was added to it, as Qwen advises."""
    given = raw.get("max_position_embeddings") or 2048
    if rope["rope_type"] != "yarn":
        return given
    return max(given, min(int(rope.get("factor", 1) * rope.get("original_max_position_embeddings", 1)), MAX_POSITIONS))


def chosen_by_context(given: Mapping[str, Any]) -> bool:
    """Whether the longest context decides rotations that transformers' class of this config.json computes."""
    kinds = (given.get(name) for name in ("rope_type", "type"))
    inner = (each for each in given.values() if isinstance(each, Mapping))
    return any(kind in _BY_CONTEXT for kind in kinds if isinstance(kind, str)) or any(map(chosen_by_context, inner))
