"""What config.json says of rotary embeddings and of positions, in one form."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.engine.checkpoint.fields import MAX_POSITIONS, ServedFields

_BY_CONTEXT = ("longrope", "su", "dynamic")
"""What transformers' classes choose by the longest context."""


def rope_of(raw: ServedFields) -> dict[str, Any]:
    """The rotary embedding's parameters, as one object with both rope_theta and rope_type.

    Files of transformers 4 have rope_theta beside an object rope_scaling, those of transformers 5 both in
    rope_parameters.
    """
    given = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    rope: dict[str, Any] = {key: value for key, value in given.items() if value is not None}
    rope.setdefault("rope_theta", raw.get("rope_theta") or 10000.0)
    rope["rope_type"] = rope.get("rope_type") or rope.pop("type", None) or "default"
    rope["rope_type"] = "default" if rope["rope_type"] == "mrope" else rope["rope_type"]
    for name in ("partial_rotary_factor", "rotary_dim"):
        if (value := raw.get(name)) is not None:
            rope.setdefault(name, value)
    return rope


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
