"""Divides an engine's device memory by use, for the live page."""

from __future__ import annotations

from quire.engine.checkpoint.kv_cache_plan import available_host_bytes, total_host_bytes
from quire.engine.common.types import EngineInfo
from quire.engine.core.stats import MemoryView
from quire.engine.processes.procfs import resident_bytes


def measure_host_memory(info: EngineInfo, resident_at_start: int) -> MemoryView | None:
    """Divide the memory of the machine, or of the process's control group."""
    total = total_host_bytes()
    if total is None or not resident_at_start:
        return None
    return divide_host_memory(
        total=total,
        available=available_host_bytes(),
        resident=resident_bytes(),
        resident_at_start=resident_at_start,
        weights=info.weight_bytes,
        kv=info.kv_bytes + info.state_bytes,
    )


def divide_gpu_memory(*, total: int, free: int, allocator: int, weights: int, kv: int) -> MemoryView:
    """`allocator`: bytes that PyTorch's allocator reserves. Weights count only up to this number, because some may be
    in other memory.
    """
    weights = min(weights, allocator)
    kv = min(kv, allocator - weights)
    runtime = max(total - free - allocator, 0)
    activations = allocator - weights - kv
    free = max(total - allocator - runtime, 0)
    return MemoryView(
        total=total, weights=weights, kv=kv, activations=activations, runtime=runtime, others=0, free=free
    )


def divide_host_memory(
    *, total: int, available: int, resident: int, resident_at_start: int, weights: int, kv: int
) -> MemoryView:
    """`resident`: the process's bytes in RAM now; `resident_at_start`: the same when the engine became ready. KV blocks
    never count as free, although they take RAM only once they are written.
    """
    others = min(max(total - available - resident, 0), total)
    weights = min(weights, total - others)
    runtime = min(max(resident_at_start - weights, 0), total - others - weights)
    kv = min(kv, total - others - weights - runtime)
    activations = min(max(resident - weights - runtime - kv, 0), total - others - weights - runtime - kv)
    free = total - others - weights - runtime - kv - activations
    return MemoryView(
        total=total, weights=weights, kv=kv, activations=activations, runtime=runtime, others=others, free=free
    )
