"""Measure memory bandwidth and FLOPS with the serving kernels: `python -m quire.kernels.rates`.

Prints JSON: `bandwidth` in bytes per second and `flops` in bfloat16 operations per second, each the best of several
tries.
"""

from __future__ import annotations

import json
import time

import torch

from quire.kernels.backend import NO_ADAPTERS
from quire.kernels.cpu.backend import CpuBackend

_NUM_TRIES = 5
_NUM_INPUTS = 4096
_NUM_OUTPUTS = 16_384
_NUM_ROWS = 512


def _best_seconds(weight: torch.Tensor, x: torch.Tensor) -> float:
    backend = CpuBackend()
    linear = backend.pack_linear(weight, None)
    best = float("inf")
    for _ in range(_NUM_TRIES):
        began = time.perf_counter()
        backend.apply_linear(linear, x, NO_ADAPTERS)
        best = min(best, time.perf_counter() - began)
    return best


def measure_rates() -> dict[str, float]:
    """Measure the rates with products: one row by 256 MiB of float32, more than caches hold, and many rows by a
    bfloat16 matrix.
    """
    reading = _best_seconds(torch.ones(_NUM_OUTPUTS, _NUM_INPUTS), torch.ones(1, _NUM_INPUTS))
    weight = torch.randn(_NUM_INPUTS, _NUM_INPUTS, generator=torch.Generator().manual_seed(0)).mul_(0.02).bfloat16()
    multiplying = _best_seconds(weight, torch.ones(_NUM_ROWS, _NUM_INPUTS, dtype=torch.bfloat16))
    return {
        "bandwidth": _NUM_OUTPUTS * _NUM_INPUTS * 4 / reading,
        "flops": 2.0 * _NUM_ROWS * _NUM_INPUTS * _NUM_INPUTS / multiplying,
    }


if __name__ == "__main__":
    with torch.inference_mode():
        print(json.dumps(measure_rates()))
