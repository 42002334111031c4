"""Divides the memory of an engine's device among what holds it, for the live view. No torch."""

from __future__ import annotations

from quire.engine.checkpoint.kv_cache_plan import available_host_bytes, total_host_bytes
from quire.engine.common.types import EngineInfo
from quire.engine.core.stats import MemoryView
from quire.engine.processes.procfs import resident_bytes


def measure_host_memory(info: EngineInfo, resident_at_start: int) -> MemoryView | None:
    """How this machine's memory, or our control group's, is divided now; see `divide_host_memory`. None if the system
    does not say."""
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
    """`allocator`: bytes that PyTorch has from the GPU. Weights may lie elsewhere; then they count no further than it
    goes."""
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
    """`resident`: bytes of the engine's process in RAM; `resident_at_start`: the same when the engine was ready, with
    its weights loaded. KV blocks are in RAM only once they have been used, but their memory is never counted as free.
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
