"""The tiers below the KV cache (docs/kv_tiers.md), as `quire plan` counts them: bytes, and how many tokens fit."""

from __future__ import annotations

from dataclasses import dataclass, replace

from quire.engine.checkpoint.kv_plan import GIB
from quire.engine.config import DISK_GIB, EngineConfig


@dataclass(frozen=True, slots=True)
class Tier:
    name: str
    size: int
    """Bytes that it may take."""
    tokens: int
    """That fit, in whole pages."""


@dataclass(frozen=True, slots=True)
class Offload:
    """What the user asked for below the KV cache."""

    memory: float = 0.0
    """GiB of the host's memory."""
    folder: str | None = None
    """On a disk; None: no such tier."""
    disk: float = DISK_GIB
    """GiB that it may take."""

    @property
    def host_bytes(self) -> int:
        return int(self.memory * GIB)

    def share(self, replicas: int) -> Offload:
        """Of each of so many."""
        return replace(self, memory=self.memory / replicas, disk=self.disk / replicas)

    @property
    def flags(self) -> list[str]:
        """Of `quire serve`."""
        found = ["--kv-offload-memory", f"{self.memory:g}"] if self.memory else []
        if self.folder is not None:
            found += ["--kv-offload-dir", self.folder]
            found += ["--kv-offload-disk", f"{self.disk:g}"] if self.disk != DISK_GIB else []
        return found

    def tiers(self, page_bytes: int, page_tokens: int) -> tuple[Tier, ...]:
        """None where there are no pages to keep."""
        bounds = {"host": self.host_bytes, "disk": int(self.disk * GIB) if self.folder is not None else 0}
        return tuple(
            Tier(name, size, size // page_bytes * page_tokens) for name, size in bounds.items() if size and page_bytes
        )


NO_OFFLOAD = Offload()


def offload_of(config: EngineConfig) -> Offload:
    return Offload(config.kv_offload_memory or 0.0, config.kv_offload_dir, config.disk_gib)
