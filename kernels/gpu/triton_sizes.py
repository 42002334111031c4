"""Sizes of launches. Triton's own functions of these names take microseconds on the host."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch

FIXED_SPLIT = 512
"""Keys in a split of deterministic attention."""
_LEAST_EVEN_SPLIT, _MOST_EVEN_SPLIT = 256, 8192
MOST_SPLITS = 32
MOST_PARTS = 2**26
"""The most partial sums, 4 bytes each, that may be stored before they are reduced."""


class Tiles(NamedTuple):
    """How many rows (query tokens times heads of a group) and keys a tile of attention has, and how it is compiled."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


def cdiv(number: int, size: int) -> int:
    return -(-number // size)


def power_of_2(number: int) -> int:
    """The next power of two, for numbers from 1 up."""
    return 1 << (number - 1).bit_length()


def wanted_programs(without: int, device: int | None) -> int:
    """Programs per tile so that two programs run on each multiprocessor, where there are `without` tiles."""
    return max(1, 2 * processors(device) // without)


def even_splits(wanted: int, seen: int, one_token: bool) -> int:
    """Splits of a tile that sees up to `seen` keys. No split is too short; in a decode step, where one long context
    would keep all others waiting, none is too long either."""
    if one_token:
        wanted = max(wanted, cdiv(seen, _MOST_EVEN_SPLIT))
    return min(wanted, cdiv(seen, _LEAST_EVEN_SPLIT), MOST_SPLITS)


@cache
def processors(device: int | None) -> int:
    """Multiprocessors of a GPU; under the interpreter, any number."""
    return 16 if device is None else torch.cuda.get_device_properties(device).multi_processor_count


@cache
def is_hopper(there: torch.device) -> bool:
    """An H100 or its kin; under the interpreter, yes."""
    return there.type != "cuda" or (torch.version.hip is None and torch.cuda.get_device_capability(there)[0] == 9)
