"""Rotary position embedding tables (Su et al., 2021) and the scalings that stretch them over longer contexts."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from quire.engine.checkpoint.families import ROPE_TYPES
from quire.engine.errors import ModelError

_LLAMA3 = ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings")

_NEEDED = {
    "linear": ("factor",),
    "llama3": ("factor", *_LLAMA3),
    "factors": ("factors",),
    "ntk": ("factor",),
    "yarn": ("factor", "original_max_position_embeddings"),
}
"""What a rope_type needs beside rope_theta."""


def rope_table(rope: dict[str, Any], head_dim: int, length: int) -> Tensor:
    """Cosines beside sines, [length, head_dim] float32, for positions 0 to length - 1.

    `rope` is ModelConfig.rope. Raises ModelError for a rope_type that is not known here.
    """
    rope_type = rope["rope_type"]
    if missing := [key for key in _NEEDED.get(rope_type, ()) if key not in rope]:
        raise ModelError(
            f"model: config.json: rope_parameters: lacks {missing[0]}, which rope_type {rope_type!r} needs"
        )
    size = 1.0
    frequencies = 1.0 / rope["rope_theta"] ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    match rope_type:
        case "default":
            pass
        case "linear":
            frequencies = frequencies / rope["factor"]
        case "llama3":
            frequencies = _llama3(frequencies, rope)
        case "factors":  # one for each frequency, as GGUF files store what llama3 computes
            if len(rope["factors"]) != len(frequencies):
                count = f"{len(rope['factors'])} for {len(frequencies)} frequencies"
                raise ModelError(f"model: config.json: rope_parameters: factors: {count}")
            frequencies = frequencies / torch.tensor(rope["factors"], dtype=torch.float32)
        case "yarn":
            frequencies, size = _yarn(frequencies, rope), _yarn_size(rope)
        case "ntk":
            frequencies = _ntk(frequencies, rope)
        case _:
            raise ModelError(f"model: rope_type {rope_type!r} is not supported ({', '.join(ROPE_TYPES)})")
    angles = torch.outer(torch.arange(length, dtype=torch.float32), frequencies)
    return torch.cat((angles.cos(), angles.sin()), dim=-1) * size


def _llama3(frequencies: Tensor, rope: dict[str, Any]) -> Tensor:
    """Llama 3.1's: long wavelengths are stretched by `factor`, short ones kept, those between blended linearly."""
    low, high, old = (rope[key] for key in _LLAMA3)
    if not low < high:
        raise ModelError(
            f"model: config.json: rope_parameters: high_freq_factor must be above low_freq_factor, got {high}"
        )
    wavelengths = 2 * math.pi / frequencies
    keep = ((old / wavelengths - low) / (high - low)).clamp(0, 1)
    return torch.where(keep == 1, frequencies, (1 - keep) * frequencies / rope["factor"] + keep * frequencies)


def _yarn(frequencies: Tensor, rope: dict[str, Any]) -> Tensor:
    """YaRN's (Peng et al., 2023): what turns less than beta_slow times within the old context is stretched by `factor`,
    what turns more than beta_fast times kept, and those between are blended, linearly by their number."""
    head_dim, old = 2 * len(frequencies), rope["original_max_position_embeddings"]
    base = max(math.log(rope["rope_theta"]), 1e-9)  # of a theta of 1, all frequencies are alike

    def number(turns: float) -> float:
        """Of the frequency that turns so often within the old context, a fraction too."""
        return head_dim * math.log(old / (turns * 2 * math.pi)) / (2 * base)

    first, last = number(rope.get("beta_fast") or 32.0), number(rope.get("beta_slow") or 1.0)
    if rope.get("truncate") is not False:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    stretch = ((torch.arange(len(frequencies)) - first) / max(last - first, 0.001)).clamp(0, 1)
    return frequencies * (1 - stretch) + frequencies / rope["factor"] * stretch


def _yarn_size(rope: dict[str, Any]) -> float:
    """What YaRN multiplies queries and keys by: attention_factor, or what follows from `factor`."""
    if (given := rope.get("attention_factor")) is not None:
        return float(given)

    def size(weight: float) -> float:
        return 0.1 * weight * math.log(max(rope["factor"], 1.0)) + 1.0

    whole = rope.get("mscale"), rope.get("mscale_all_dim")
    return size(whole[0]) / size(whole[1]) if whole[0] and whole[1] else size(1.0)


def _ntk(frequencies: Tensor, rope: dict[str, Any]) -> Tensor:
    """GTE's: each frequency is divided by its own power of `factor`, the lowest by the whole of it (Su, 2023,
    https://kexue.fm/archives/9706, equation 6; with `mixed_b` equations 10 to 13)."""
    half, factor = len(frequencies), rope["factor"]
    numbers = torch.arange(1, half + 1, dtype=torch.float32)
    exponents = numbers / half if rope.get("mixed_b") is None else (numbers / half) ** rope["mixed_b"]
    return frequencies / factor**exponents
