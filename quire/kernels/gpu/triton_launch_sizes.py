"""Sizes of launches. Triton's own cdiv and next_power_of_2 take microseconds on the host."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor
from triton import knobs
from triton.runtime import driver

FIXED_SPLIT = 512
_MIN_EVEN_SPLIT, _MAX_EVEN_SPLIT = 256, 8192
MAX_SPLITS = 32
MAX_PARTIAL_SUMS = 2**26
"""A sum has 4 bytes."""


class AttentionTiles(NamedTuple):
    """Rows (block_m) are query tokens times heads of a group."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


def cdiv(number: int, size: int) -> int:
    return -(-number // size)


def next_power_of_2(number: int) -> int:
    return 1 << (number - 1).bit_length()


def programs_per_tile(num_tiles: int, device: int | None, programs_per_processor: int = 2) -> int:
    return max(1, programs_per_processor * num_multiprocessors(device) // num_tiles)


def num_even_splits(
    wanted: int, seen: int, one_token: bool, *, least: int = _MIN_EVEN_SPLIT, most: int = MAX_SPLITS
) -> int:
    """`seen` is a number of keys, and `least` the minimum of keys per split. A decode gets more than `wanted` if splits
    would otherwise be longer than _MAX_EVEN_SPLIT, because one long context would delay all others.
    """
    if one_token:
        wanted = max(wanted, cdiv(seen, _MAX_EVEN_SPLIT))
    return min(wanted, cdiv(seen, least), most)


@cache
def num_multiprocessors(device: int | None) -> int:
    """Under the interpreter (device None), the number is arbitrary."""
    return 16 if device is None else torch.cuda.get_device_properties(device).multi_processor_count


@cache
def shared_memory_bytes(device: int | None) -> int:
    """Return bytes per program, or a consumer GPU's under the interpreter (device None)."""
    if device is None:
        return 99 * 1024
    num_bytes: int = getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", 48 * 1024)
    return num_bytes


def is_hopper(device: int | None) -> bool:
    """Return True if kernels are compiled for compute capability 9.0 (tensor cores of 64 rows, 227 KB of shared memory
    per program). The target is this device, or that of `set_compile_target`.
    """
    return cuda_capability(device) == 90


def is_consumer_blackwell(device: int | None) -> bool:
    """On compute capability 12.0 the same tiles need more registers."""
    return cuda_capability(device) == 120


def cuda_capability(device: int | None) -> int | None:
    """Return 90 for compute capability 9.0, and so on, of the target that `is_hopper` describes. None means an AMD GPU,
    the interpreter or no driver.
    """
    try:
        backend, architecture = ("", 0) if knobs.runtime.interpret else _compile_target(device)
    except RuntimeError:  # without a driver nothing is launched
        return None
    return int(architecture) if backend == "cuda" else None


@cache
def _compile_target(device: int | None) -> tuple[str, int | str]:
    target = driver.active.get_current_target()
    return target.backend, target.arch


def allocate_split_buffers(rows: int, splits: int, width: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Allocate float32 weighted values [rows, splits, width], maxima and sums [rows, splits]. In one tensor the
    alignment of sums, and so the kernel variant, would depend on rows and splits.
    """
    shapes = (rows, splits, width), (rows, splits), (rows, splits)
    weighted, peaks, totals = (torch.empty(shape, dtype=torch.float32, device=device) for shape in shapes)
    return weighted, peaks, totals
