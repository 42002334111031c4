"""How fast this machine reads memory and multiplies, by the kernels that serve: `python -m quire.kernels.rates`.

Prints JSON: `bandwidth` in bytes and `flops` in operations of bfloat16 a second, each the best of some tries.
"""

from __future__ import annotations

import json
import time

import torch

from quire.kernels.backend import NO_ADAPTERS
from quire.kernels.cpu.backend import Cpu

_TRIES = 5
_WIDE, _LONG, _ROWS = 4096, 16_384, 512


def _seconds(weight: torch.Tensor, x: torch.Tensor) -> float:
    backend = Cpu()
    linear = backend.pack_linear(weight, None)
    best = float("inf")
    for _ in range(_TRIES):
        began = time.perf_counter()
        backend.apply(linear, x, NO_ADAPTERS)
        best = min(best, time.perf_counter() - began)
    return best


def measured() -> dict[str, float]:
    """One row times 256 MiB of float32, which no cache holds; and many rows times a matrix of bfloat16."""
    reading = _seconds(torch.ones(_LONG, _WIDE), torch.ones(1, _WIDE))
    weight = torch.randn(_WIDE, _WIDE, generator=torch.Generator().manual_seed(0)).mul_(0.02).bfloat16()
    multiplying = _seconds(weight, torch.ones(_ROWS, _WIDE, dtype=torch.bfloat16))
    return {"bandwidth": _LONG * _WIDE * 4 / reading, "flops": 2.0 * _ROWS * _WIDE * _WIDE / multiplying}


if __name__ == "__main__":
    with torch.inference_mode():
        print(json.dumps(measured()))
