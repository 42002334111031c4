"""Each replica's share of the machine's threads, memory, disk and GPUs."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence, Set
from pathlib import Path

from quire.engine.common.config import EngineConfig
from quire.engine.processes.cpu_cores import allowed_cores, cpu_quota, node_cores, threads_on
from quire.engine.processes.gpus import VisibleGPUs, describe_division, divide_gpus

_THREADS = "OMP_NUM_THREADS"


def replica_cores(count: int) -> Sequence[Set[int]]:
    """Empty sets mean any core."""
    return node_cores(count, allowed_cores()) or [set()] * count


def replica_environments(config: EngineConfig, gpus: VisibleGPUs | None) -> list[Mapping[str, str]]:
    """Raises ConfigError if there are too few GPUs."""
    if gpus is None:
        return [{}] * config.data_parallel_size
    parts = divide_gpus(gpus, config.data_parallel_size, config.world_size)
    return [{gpus.variable: ",".join(part)} for part in parts]


def describe_replicas(config: EngineConfig, gpus: VisibleGPUs | None) -> str:
    count, each = config.data_parallel_size, config.world_size
    note = f"{count} replicas, each with weights and a KV cache as shown here"
    if gpus is None:
        return note
    note += f": {describe_division(divide_gpus(gpus, count, each))}"
    visible, most = len(gpus.ids), len(gpus.ids) // each
    if most > count:
        note += f". {visible} GPUs are visible, {count * each} are used: --data-parallel-size {most} uses all it can"
    return note


def replica_config(
    config: EngineConfig,
    index: int,
    cores: Sequence[Set[int]],
    root: Path = Path("/"),
    *,
    on_gpus: bool = False,
) -> EngineConfig:
    """The replica gets an even share of host memory, disk and threads, and a folder of its own in --kv-offload-dir.
    `root`: see cpu_quota.
    """
    count, update = config.data_parallel_size, dict[str, object]()
    if on_gpus and config.device == "auto":
        update["device"] = "cuda"
    for name in ("kv_offload_memory",) if on_gpus else ("kv_cache_memory", "kv_offload_memory"):
        if (total := getattr(config, name)) is not None:
            update[name] = total / count
    if config.kv_events_config is not None:
        update["kv_events_config"] = config.kv_events_config.for_replica(index)
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
