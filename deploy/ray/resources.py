"""What Ray reserves for a replica. This needs no Ray."""

from __future__ import annotations

from typing import Any

from quire.server.config import ServerConfig


def processes_per_replica(config: ServerConfig) -> int:
    """Ranks of all engines (tensor_parallel_size, data_parallel_size) of one replica."""
    return config.world_size * config.data_parallel_size


def replica_resources(config: ServerConfig, cluster_gpus: float) -> dict[str, Any]:
    """Options of the deployment: a core per thread and, on GPUs, a GPU per rank. `cluster_gpus`: those of all machines.

    Ranks share memory, so all of a replica's must be on one machine. Its GPUs are in the first bundle, because the
    replica's actor is there and passes them on to the processes that it starts.
    """
    parts = processes_per_replica(config)
    cores = max(1, (config.threads or 1) // parts)
    uses_gpus = config.device in ("cuda", "xpu") or (config.device == "auto" and cluster_gpus > 0)
    actor: dict[str, Any] = {"num_cpus": cores} | ({"num_gpus": parts} if uses_gpus else {})
    options: dict[str, Any] = {"ray_actor_options": actor}
    if parts > 1:
        first: dict[str, int] = {"CPU": cores} | ({"GPU": parts} if uses_gpus else {})
        bundles = [first, *({"CPU": cores} for _ in range(parts - 1))]
        options |= {"placement_group_bundles": bundles, "placement_group_strategy": "STRICT_PACK"}
    return options
