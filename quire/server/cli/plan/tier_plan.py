from __future__ import annotations

from dataclasses import dataclass

from quire.engine.checkpoint.kv_cache_plan import GIB
from quire.engine.common.config import EngineConfig


@dataclass(frozen=True, slots=True)
class KVTierSize:
    name: str
    num_bytes: int
    num_tokens: int


def host_tier_bytes(config: EngineConfig) -> int:
    return int((config.kv_offload_memory or 0.0) * GIB)


def plan_tiers(config: EngineConfig, replicas: int, page_bytes: int, page_tokens: int) -> tuple[KVTierSize, ...]:
    memory, disk = config.kv_offload_memory or 0.0, config.kv_disk_gib if config.kv_offload_dir is not None else 0.0
    bounds = {"host": int(memory / replicas * GIB), "disk": int(disk / replicas * GIB)}
    return tuple(
        KVTierSize(name, size, size // page_bytes * page_tokens) for name, size in bounds.items() if size and page_bytes
    )
