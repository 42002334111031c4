"""Sizes of launches. Triton's own functions of these names take microseconds on the host."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor
from triton import knobs
from triton.runtime import driver

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


def wanted_programs(without: int, device: int | None, each: int = 2) -> int:
    """Programs per tile so that `each` programs run on each multiprocessor, where there are `without` tiles."""
    return max(1, each * processors(device) // without)


def even_splits(
    wanted: int, seen: int, one_token: bool, *, least: int = _LEAST_EVEN_SPLIT, most: int = MOST_SPLITS
) -> int:
    """Splits of a tile that sees up to `seen` keys, at most `most`. None is shorter than `least` keys; in a decode
    step, where one long context would keep all others waiting, none is too long either."""
    if one_token:
        wanted = max(wanted, cdiv(seen, _MOST_EVEN_SPLIT))
    return min(wanted, cdiv(seen, least), most)


@cache
def processors(device: int | None) -> int:
    """Multiprocessors of a GPU; under the interpreter, any number."""
    return 16 if device is None else torch.cuda.get_device_properties(device).multi_processor_count


@cache
def shared_bytes(device: int | None) -> int:
    """What a program's shared memory may be; under the interpreter, a consumer GPU's."""
    if device is None:
        return 99 * 1024
    found: int = getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", 48 * 1024)
    return found


def is_hopper(device: int | None) -> bool:
    """Whether kernels are compiled for compute capability 9.0, whose tensor cores multiply 64 rows at a time and whose
    programs have 227 KB of shared memory: for this device, or what `kinds.aim` names on a machine without one."""
    return _is(device, 90)


def is_consumers_blackwell(device: int | None) -> bool:
    """Whether they are for 12.0, whose compiler needs more registers than others for the same tiles; likewise."""
    return _is(device, 120)


def _is(device: int | None, capability: int) -> bool:
    try:
        return not knobs.runtime.interpret and _target(device) == ("cuda", capability)
    except RuntimeError:  # Triton has no driver, so nothing is launched
        return False


@cache
def _target(device: int | None) -> tuple[str, int | str]:
    target = driver.active.get_current_target()
    return target.backend, target.arch


def split_parts(rows: int, splits: int, width: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Room for what splits of attention give, of so many numbers: weighted values, peaks and totals, float32. Each is a
    tensor of its own: within one, totals would begin where rows and splits say, and kernels come in kinds by whether
    that is a multiple of 16 bytes."""
    shapes = (rows, splits, width), (rows, splits), (rows, splits)
    weighted, peaks, totals = (torch.empty(shape, dtype=torch.float32, device=device) for shape in shapes)
    return weighted, peaks, totals
