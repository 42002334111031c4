"""Rotary position embedding tables (Su et al., 2021) and the scalings that stretch them over longer contexts."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from quire.engine.errors import ModelError


def rope_table(rope: dict[str, Any], head_dim: int, length: int) -> Tensor:
    """Cosines beside sines, [length, head_dim] float32, for positions 0 to length - 1.

    `rope` is ModelConfig.rope. Raises ModelError for a rope_type that is not known here.
    """
    rope_type = rope["rope_type"]
    frequencies = 1.0 / rope["rope_theta"] ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    match rope_type:
        case "default":
            pass
        case "linear":
            frequencies = frequencies / rope["factor"]
        case "llama3":
            frequencies = _llama3(frequencies, rope)
        case _:
            raise ModelError(f"model: rope_type {rope_type!r} is not supported (default, linear, llama3)")
    angles = torch.outer(torch.arange(length, dtype=torch.float32), frequencies)
    return torch.cat((angles.cos(), angles.sin()), dim=-1)


def _llama3(frequencies: Tensor, rope: dict[str, Any]) -> Tensor:
    """Llama 3.1's: long wavelengths are stretched by `factor`, short ones kept, those between blended linearly."""
    low, high, old = rope["low_freq_factor"], rope["high_freq_factor"], rope["original_max_position_embeddings"]
    wavelengths = 2 * math.pi / frequencies
    keep = ((old / wavelengths - low) / (high - low)).clamp(0, 1)
    return torch.where(keep == 1, frequencies, (1 - keep) * frequencies / rope["factor"] + keep * frequencies)
