from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from quire.server.access.memory_lease import MemoryLease
from quire.server.shared_capacity import SharedCapacity

_MAX_BYTES = 64 << 20
"""For messages that wait, and for responses that can be continued without the store."""


@dataclass(frozen=True, slots=True)
class WebSocketLimits:
    """Of all WebSockets together. With API keys, a tenant must leave others as much as it has."""

    connections: SharedCapacity
    memory: SharedCapacity

    @classmethod
    def from_max_connections(cls, max_connections: int) -> Self:
        return cls(SharedCapacity(max_connections), SharedCapacity(_MAX_BYTES))

    def new_lease(self, owner: str) -> MemoryLease:
        """For one connection."""
        return MemoryLease(self.memory, owner)
