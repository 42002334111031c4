from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from quire.server.access.memory_lease import MemoryLease
from quire.server.shared_capacity import SharedCapacity

_MAX_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class WebSocketLimits:
    """Limits of all WebSockets together."""

    connections: SharedCapacity
    memory: SharedCapacity

    @classmethod
    def from_max_connections(cls, max_connections: int) -> Self:
        return cls(SharedCapacity(max_connections), SharedCapacity(_MAX_BYTES))

    def new_connection_lease(self, owner: str) -> MemoryLease:
        return MemoryLease(self.memory, owner)
