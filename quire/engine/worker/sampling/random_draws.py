"""Uniform numbers from (seed, position) by SplitMix64 (Steele et al., 2014)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

_XTC_STREAM = 0x5DEECE66D1B7C3A5
"""Makes XTC's draws independent of the draws that sample tokens."""


def uniform_draws(seeds: Sequence[int], positions: Sequence[int]) -> Tensor:
    """Returns [n] float64 in [0, 1)."""
    return torch.from_numpy(_uniform_array(seeds, positions, 0))


def xtc_draw(seed: int, position: int) -> float:
    """Returns a number in [0, 1)."""
    return float(_uniform_array([seed], [position], _XTC_STREAM)[0])


def _uniform_array(seeds: Sequence[int], positions: Sequence[int], stream: int) -> np.ndarray:
    mixed = _splitmix64(np.array([(seed & 0xFFFFFFFFFFFFFFFF) ^ stream for seed in seeds], dtype=np.uint64))
    with np.errstate(over="ignore"):
        z = mixed + (np.array(positions, dtype=np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    return (_splitmix64(z) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _splitmix64(z: np.ndarray) -> np.ndarray:
    """Seeds are mixed, because the streams of neighboring seeds must not overlap."""
    with np.errstate(over="ignore"):
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
