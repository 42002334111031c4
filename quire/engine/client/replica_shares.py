"""What each replica gets of the machine: its part of the processor's threads, of the memory and of the disk."""

from __future__ import annotations

import os
from collections.abc import Sequence, Set
from pathlib import Path

from quire.engine.common.config import EngineConfig
from quire.engine.processes.cpu_cores import allowed_cores, cpu_quota, node_cores, threads_on

_THREADS = "OMP_NUM_THREADS"
"""Where it is set, it is said of each process."""


def replica_cores(count: int) -> Sequence[Set[int]]:
    """The cores that each replica stays on: those of its NUMA nodes. Empty where there is but one node."""
    return node_cores(count, allowed_cores()) or [set()] * count


def replica_config(config: EngineConfig, index: int, cores: Sequence[Set[int]], root: Path = Path("/")) -> EngineConfig:
    """The settings of one replica of those that `config` is for: bytes and threads are those of all together, each has
    its part. Each has a folder of its own in --kv-offload-dir. `cores`: those of each. `root`: as cpu_quota has it.
    """
    count, update = config.data_parallel_size, dict[str, object]()
    for name in ("kv_cache_memory", "kv_offload_memory"):
        if (total := getattr(config, name)) is not None:
            update[name] = total / count
    if config.kv_offload_dir is not None:
        update["kv_offload_dir"] = str(Path(config.kv_offload_dir) / f"replica-{index}")
        update["kv_offload_disk"] = config.kv_disk_gib / count
    if config.threads is not None:
        update["threads"] = max(config.threads // count, 1)
    elif _THREADS not in os.environ:
        bound_cores = cores[index] or allowed_cores() or {*range(os.cpu_count() or 1)}
        threads, quota = threads_on(bound_cores) // cores.count(cores[index]), cpu_quota(root)
        update["threads"] = max(threads if quota is None else min(threads, int(quota) // count), 1)
    return config.model_copy(update=update)
