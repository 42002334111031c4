from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from quire.engine.common.types import EngineInfo
from quire.engine.core.memory_division import divide_gpu_memory, measure_host_memory
from quire.engine.core.stats import MemoryView
from quire.engine.processes.procfs import resident_bytes
from quire.engine.worker.device_memory import measure_gpu_memory

MemoryMeter = Callable[[], MemoryView | None]


def make_memory_meter(info: EngineInfo, world_size: int) -> MemoryMeter:
    """Call when the engine is ready, because all memory that is then in use counts as weights and libraries."""
    if world_size > 1:
        return lambda: None
    if info.device == "cpu":
        return partial(measure_host_memory, info, resident_bytes())
    return partial(_measure_gpu, info)


def _measure_gpu(info: EngineInfo) -> MemoryView | None:
    gpu = measure_gpu_memory(torch.device(info.device))
    if gpu is None:
        return None
    kv = info.kv_bytes + info.state_bytes
    return divide_gpu_memory(total=gpu.total, free=gpu.free, allocator=gpu.allocator, weights=info.weight_bytes, kv=kv)
