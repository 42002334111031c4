"""RoPE tables (Su et al., 2021) and their scalings."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.engine.architecture.rope import ROPE_TYPES, QueryScaling, rotated_size, yarn_mscale
from quire.engine.common.errors import ModelError

_LLAMA3_FIELDS = ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings")

_REQUIRED_FIELDS = {
    "linear": ("factor",),
    "llama3": ("factor", *_LLAMA3_FIELDS),
    "factors": ("factors",),
    "dynamic": (),
    "longrope": ("short_factor", "long_factor", "original_max_position_embeddings", "max_position_embeddings"),
    "axial": (),
    "ntk": ("factor",),
    "proportional": (),
    "yarn": ("factor", "original_max_position_embeddings"),
}
"""Fields required in addition to rope_theta, by type."""


def rope_table(rope: dict[str, Any], head_dim: int, length: int) -> Tensor:
    """Returns cosines, then sines, as [length, head_dim] float32. Raises ModelError."""
    rope_type = rope["rope_type"]
    if missing := [key for key in _REQUIRED_FIELDS.get(rope_type, ()) if key not in rope]:
        raise ModelError(
            f"model: config.json: rope_parameters: lacks {missing[0]}, which rope_type {rope_type!r} needs"
        )
    rotated = rotated_size(rope, head_dim)
    base_frequencies = _base_frequencies(rope["rope_theta"], rotated)
    if rope_type not in _FREQUENCY_SCALINGS:
        raise ModelError(f"model: rope_type {rope_type!r} is not supported ({', '.join(ROPE_TYPES)})")
    frequencies = _FREQUENCY_SCALINGS[rope_type](base_frequencies, rope, head_dim)
    attention_factor = _attention_factor(rope)
    angles = torch.outer(torch.arange(length, dtype=torch.float32), frequencies)
    num_unrotated = (head_dim - rotated) // 2
    return torch.cat(
        (
            F.pad(angles.cos() * attention_factor, (0, num_unrotated), value=1.0),
            F.pad(angles.sin() * attention_factor, (0, num_unrotated)),
        ),
        dim=-1,
    )


def _base_frequencies(theta: float, rotated: int) -> Tensor:
    return 1.0 / theta ** (torch.arange(0, rotated, 2, dtype=torch.float32) / rotated)


def _attention_factor(rope: dict[str, Any]) -> float:
    if rope["rope_type"] == "longrope":
        return _longrope_attention_factor(rope)
    if rope["rope_type"] == "yarn":
        return _yarn_attention_factor(rope)
    return 1.0


def query_scales(query_scaling: QueryScaling, length: int) -> Tensor:
    """Returns the factor of queries at each position, [length] float32."""
    first = query_scaling.first_position
    positions = torch.arange(first, first + length, dtype=torch.float32)
    return 1 + query_scaling.log_factor * torch.log(1 + torch.floor(positions / query_scaling.context_len))


def alibi_bias_table(heads: int, length: int) -> Tensor:
    """Returns ALiBi (Press et al., 2022) as [heads, 2 * length + 15]."""
    power_of_two = 2 ** math.floor(math.log2(heads))
    slopes = [2.0 ** (-8.0 * number / power_of_two) for number in range(1, power_of_two + 1)]
    slopes += [2.0 ** (-4.0 * number / power_of_two) for number in range(1, 2 * (heads - power_of_two), 2)]
    distances = torch.arange(2 * length + 15, dtype=torch.float32) - (length - 1)
    return torch.tensor(slopes)[:, None] * distances


def _parse_factors_field(rope: dict[str, Any], name: str, count: int) -> Tensor:
    if len(rope[name]) != count:
        raise ModelError(f"model: config.json: rope_parameters: {name}: {len(rope[name])} for {count} frequencies")
    return torch.tensor(rope[name], dtype=torch.float32)


def _longrope_factors(rope: dict[str, Any], count: int) -> Tensor:
    """LongRoPE (Ding et al., 2024). Long factors apply if contexts may exceed the original length. Choosing factors by
    the length of a request would change the request's keys midway.
    """
    long = rope["max_position_embeddings"] > rope["original_max_position_embeddings"]
    return _parse_factors_field(rope, "long_factor" if long else "short_factor", count)


def _longrope_attention_factor(rope: dict[str, Any]) -> float:
    if (attention_factor := rope.get("attention_factor")) is not None:
        return float(attention_factor)
    old = rope["original_max_position_embeddings"]
    factor = rope.get("factor") or rope["max_position_embeddings"] / old
    return 1.0 if factor <= 1 or old < 2 else math.sqrt(1 + math.log(factor) / math.log(old))


def _llama3_frequencies(frequencies: Tensor, rope: dict[str, Any]) -> Tensor:
    """Llama 3.1's: stretch long wavelengths by `factor`, keep short ones, and blend the others linearly."""
    low, high, old = (rope[key] for key in _LLAMA3_FIELDS)
    if low > high:
        raise ModelError(
            f"model: config.json: rope_parameters: high_freq_factor must not be below low_freq_factor, got {high}"
        )
    num_turns = old * frequencies / (2 * math.pi)
    keep = (
        ((num_turns - low) / (high - low)).clamp(0, 1) if low < high else (num_turns >= low).float()
    )  # in Llama 4, low and high are equal
    return torch.where(keep == 1, frequencies, (1 - keep) * frequencies / rope["factor"] + keep * frequencies)


def _yarn_frequencies(frequencies: Tensor, rope: dict[str, Any]) -> Tensor:
    """YaRN (Peng et al., 2023)."""
    head_dim, old = 2 * len(frequencies), rope["original_max_position_embeddings"]
    base = max(math.log(rope["rope_theta"]), 1e-9)  # with theta 1, all frequencies are equal

    def correction_dim(turns: float) -> float:
        return head_dim * math.log(old / (turns * 2 * math.pi)) / (2 * base)

    first, last = correction_dim(rope.get("beta_fast") or 32.0), correction_dim(rope.get("beta_slow") or 1.0)
    if rope.get("truncate") is not False:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    stretch = ((torch.arange(len(frequencies)) - first) / max(last - first, 0.001)).clamp(0, 1)
    return frequencies * (1 - stretch) + frequencies / rope["factor"] * stretch


def _yarn_attention_factor(rope: dict[str, Any]) -> float:
    if (attention_factor := rope.get("attention_factor")) is not None:
        return float(attention_factor)
    mscales = rope.get("mscale"), rope.get("mscale_all_dim")
    return (
        yarn_mscale(rope, mscales[0]) / yarn_mscale(rope, mscales[1])
        if mscales[0] and mscales[1]
        else yarn_mscale(rope, 1.0)
    )


def _ntk_frequencies(frequencies: Tensor, rope: dict[str, Any]) -> Tensor:
    """NTK scaling of GTE (Su, 2023, https://kexue.fm/archives/9706, equation 6; with `mixed_b` equations 10 to 13)."""
    half, factor = len(frequencies), rope["factor"]
    numbers = torch.arange(1, half + 1, dtype=torch.float32)
    exponents = numbers / half if rope.get("mixed_b") is None else (numbers / half) ** rope["mixed_b"]
    return frequencies / factor**exponents


def _dynamic_frequencies(rope: dict[str, Any], rotated: int) -> Tensor:
    """HunYuan's alpha stretches all frequencies. Without alpha, frequencies are unchanged, because contexts end where
    scaling begins.
    """
    stretched = rope["rope_theta"] * (rope.get("alpha") or 1.0) ** (rotated / max(rotated - 2, 1))
    return _base_frequencies(stretched, rotated)


def _axial_frequencies(rope: dict[str, Any], rotated: int) -> Tensor:
    """For vision towers. Rows rotate one half of a head, columns the other."""
    half = 1.0 / rope["rope_theta"] ** (torch.arange(0, rotated // 2, 2, dtype=torch.float32) / (rotated // 2))
    return torch.cat((half, half))


def _proportional_frequencies(frequencies: Tensor, rope: dict[str, Any], head_dim: int) -> Tensor:
    """In Gemma 4 the lowest frequencies are zero."""
    num_rotating = int((rope.get("partial_rotary_factor") or 1.0) * head_dim // 2)
    return frequencies / rope.get("factor", 1.0) * (torch.arange(len(frequencies)) < num_rotating)


_FREQUENCY_SCALINGS: dict[str, Callable[[Tensor, dict[str, Any], int], Tensor]] = {
    "default": lambda frequencies, rope, head_dim: frequencies,
    "linear": lambda frequencies, rope, head_dim: frequencies / rope["factor"],
    "llama3": lambda frequencies, rope, head_dim: _llama3_frequencies(frequencies, rope),
    # one factor per frequency, as GGUF stores llama3 scaling
    "factors": lambda frequencies, rope, head_dim: (
        frequencies / _parse_factors_field(rope, "factors", len(frequencies))
    ),
    "longrope": lambda frequencies, rope, head_dim: frequencies / _longrope_factors(rope, len(frequencies)),
    "dynamic": lambda frequencies, rope, head_dim: _dynamic_frequencies(rope, rotated_size(rope, head_dim)),
    "yarn": lambda frequencies, rope, head_dim: _yarn_frequencies(frequencies, rope),
    "ntk": lambda frequencies, rope, head_dim: _ntk_frequencies(frequencies, rope),
    "axial": lambda frequencies, rope, head_dim: _axial_frequencies(rope, rotated_size(rope, head_dim)),
    "proportional": _proportional_frequencies,
}
"""Maps (base frequencies, ModelConfig.rope, head_dim) to frequencies."""
