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
_MIN_EVEN_SPLIT, _MAX_EVEN_SPLIT = 256, 8192
MAX_SPLITS = 32
MAX_PARTIAL_SUMS = 2**26
"""The most partial sums, 4 bytes each, that may be stored before they are reduced."""


class AttentionTiles(NamedTuple):
    """How many rows (query tokens times heads of a group) and keys a tile of attention has, and how it is compiled."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


def cdiv(number: int, size: int) -> int:
    return -(-number // size)


def next_power_of_2(number: int) -> int:
    """The next power of two, for numbers from 1 up."""
    return 1 << (number - 1).bit_length()


def programs_per_tile(num_tiles: int, device: int | None, programs_per_processor: int = 2) -> int:
    """Programs per tile so that `programs_per_processor` programs run on each multiprocessor, where there are
    `num_tiles` tiles."""
    return max(1, programs_per_processor * num_multiprocessors(device) // num_tiles)


def num_even_splits(
    wanted: int, seen: int, one_token: bool, *, least: int = _MIN_EVEN_SPLIT, most: int = MAX_SPLITS
) -> int:
    """Splits of a tile that sees up to `seen` keys, at most `most`. None is shorter than `least` keys; in a decode
    step, where one long context would keep all others waiting, none is too long either."""
    if one_token:
        wanted = max(wanted, cdiv(seen, _MAX_EVEN_SPLIT))
    return min(wanted, cdiv(seen, least), most)


@cache
def num_multiprocessors(device: int | None) -> int:
    """Multiprocessors of a GPU; under the interpreter, any number."""
    return 16 if device is None else torch.cuda.get_device_properties(device).multi_processor_count


@cache
def shared_memory_bytes(device: int | None) -> int:
    """What a program's shared memory may be; under the interpreter, a consumer GPU's."""
    if device is None:
        return 99 * 1024
    num_bytes: int = getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", 48 * 1024)
    return num_bytes


def is_hopper(device: int | None) -> bool:
    """Whether kernels are compiled for compute capability 9.0, whose tensor cores multiply 64 rows at a time and whose
    programs have 227 KB of shared memory: for this device, or what `kinds.aim` names on a machine without one."""
    return _has_capability(device, 90)


def is_consumer_blackwell(device: int | None) -> bool:
    """Whether they are for 12.0, whose compiler needs more registers than others for the same tiles; likewise."""
    return _has_capability(device, 120)


def _has_capability(device: int | None, capability: int) -> bool:
    try:
        return not knobs.runtime.interpret and _compile_target(device) == ("cuda", capability)
    except RuntimeError:  # Triton has no driver, so nothing is launched
        return False


@cache
def _compile_target(device: int | None) -> tuple[str, int | str]:
    target = driver.active.get_current_target()
    return target.backend, target.arch


def allocate_split_buffers(rows: int, splits: int, width: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Room for what splits of attention give, of so many numbers: weighted values, peaks and totals, float32. Each is a
    tensor of its own: within one, totals would begin where rows and splits say, and kernels come in kinds by whether
    that is a multiple of 16 bytes."""
    shapes = (rows, splits, width), (rows, splits), (rows, splits)
    weighted, peaks, totals = (torch.empty(shape, dtype=torch.float32, device=device) for shape in shapes)
    return weighted, peaks, totals
