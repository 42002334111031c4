"""Sizes of launches. Triton's own functions of these names take microseconds on the host."""

from __future__ import annotations

from functools import cache

import torch


def cdiv(number: int, size: int) -> int:
    return -(-number // size)


def power_of_2(number: int) -> int:
    """The next power of two, for numbers from 1 up."""
    return 1 << (number - 1).bit_length()


@cache
def processors(device: int | None) -> int:
    """Multiprocessors of a GPU; under the interpreter, any number."""
    return 16 if device is None else torch.cuda.get_device_properties(device).multi_processor_count
