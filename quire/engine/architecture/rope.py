from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quire.engine.common.errors import ModelError

ROPE_TYPES = ("default", "dynamic", "factors", "linear", "llama3", "longrope", "ntk", "proportional", "yarn")


def rotated_size(rope: Mapping[str, Any], head_dim: int) -> int:
    """Count the first elements of a head that rotate. Raises ModelError."""
    part = 1.0 if rope.get("rope_type") == "proportional" else rope.get("partial_rotary_factor") or 1.0
    size = rope.get("rotary_dim") or int(head_dim * part)
    if not 2 <= size <= head_dim or size % 2:
        raise ModelError(f"model: config.json: {size} of a head's {head_dim} numbers cannot be rotated")
    return int(size)


def parse_mrope_axes(rope: dict[str, Any], head_dim: int, interleaved: tuple[int, ...]) -> tuple[int, ...]:
    """Return each frequency's axis: 0 time, 1 rows, 2 columns (Wang et al., 2024). Axes have consecutive frequencies if
    `interleaved` is empty. Otherwise they alternate, and `interleaved` has their default sizes. Raises ModelError.
    """
    count = rotated_size(rope, head_dim) // 2
    sections = rope.get("mrope_section") or interleaved
    if len(sections) != 3 or (not interleaved and sum(sections) != count):
        problem = f"mrope_section: {list(sections)} are not three parts of {count} frequencies"
        raise ModelError(f"model: config.json: rope_parameters: {problem}")
    if not interleaved:
        return tuple(axis for axis, size in enumerate(sections) for _ in range(size))
    axes = [0] * count
    for axis in (1, 2):
        for index in range(axis, min(3 * sections[axis], count), 3):
            axes[index] = axis
    return tuple(axes)


@dataclass(frozen=True, slots=True)
class QueryScaling:
    """Scaling of queries by the logarithm of position / context_len (Llama 4, 2025; Nakanishi, 2025)."""

    log_factor: float
    context_len: int
    first_position: int = 0


def parse_query_scaling(rope: dict[str, Any]) -> QueryScaling | None:
    """Raises ModelError."""
    if not (beta := rope.get("llama_4_scaling_beta")):
        return None
    if (original_max_position := rope.get("original_max_position_embeddings")) is None:
        raise ModelError(
            "model: config.json: rope_parameters: lacks original_max_position_embeddings, which llama_4_scaling_beta "
            "needs"
        )
    return QueryScaling(beta, original_max_position)


def yarn_softmax_scale_factor(rope: dict[str, Any]) -> float:
    """DeepSeek's mscale, squared; 1 without mscale_all_dim."""
    weight = rope.get("mscale_all_dim")
    return 1.0 if rope["rope_type"] == "default" or not weight else yarn_mscale(rope, weight) ** 2


def yarn_mscale(rope: dict[str, Any], weight: float) -> float:
    return float(0.1 * weight * math.log(max(rope.get("factor", 1.0), 1.0)) + 1.0)
