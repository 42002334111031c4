"""Counts the memory that a request uses from parsing until its answer is sent."""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire.engine.common.errors import Overloaded
from quire.server.access.authentication import tenant_of
from quire.server.access.body_reader import UNCOUNTED_BYTES
from quire.server.shared_capacity import SharedCapacity

MAX_LEASED_BYTES = 64 << 20
"""For comparison: the requests of 60 agents, each with 100 KB of tools and instructions that are echoed, use 18 MB."""
MAX_LEASED_IMAGE_BYTES = 512 << 20
"""A high-resolution image takes 13 MB until its answer ends."""
_LEASE_SCOPE_KEY = "quire.hold"


class MemoryLease:
    """A lease up to `uncounted_bytes` is free."""

    __slots__ = ("_budget", "_counted", "_free", "_owner", "_size")

    def __init__(self, budget: SharedCapacity, owner: str, uncounted_bytes: int = UNCOUNTED_BYTES) -> None:
        self._budget = budget
        self._owner = owner
        self._free = uncounted_bytes
        self._size = 0
        self._counted = 0

    @property
    def leased_bytes(self) -> int:
        return self._counted

    def grow_lease(self, size: int) -> None:
        """Raises Overloaded if other leases leave too little room. If no other lease counts, any size is granted."""
        leased_bytes = self._size + size if self._size + size > self._free else 0
        added_bytes = leased_bytes - self._counted
        if (
            added_bytes
            and self._budget.total_used > self._counted
            and not self._budget.has_room(self._owner, added_bytes)
        ):
            raise Overloaded("Answers that are unfinished or unread use all the memory reserved for them")
        self._size += size
        self._counted = leased_bytes
        self._budget.adjust_held_amount(self._owner, added_bytes)

    def shrink_lease(self, size: int) -> None:
        self._size -= size
        leased_bytes = self._size if self._size > self._free else 0
        self._budget.adjust_held_amount(self._owner, leased_bytes - self._counted)
        self._counted = leased_bytes

    def move_to_new_lease(self) -> MemoryLease:
        """The new lease is for an answer that continues without its connection. It counts from its first byte. Raises
        Overloaded.
        """
        other = MemoryLease(self._budget, self._owner, uncounted_bytes=0)
        size = self._size
        self.release_lease()
        other.grow_lease(size)
        return other

    def release_lease(self) -> None:
        self._budget.adjust_held_amount(self._owner, -self._counted)
        self._size = self._counted = 0


class MemoryLeaseMiddleware:
    """Releases a request's lease when the answer has left the connection's buffer."""

    def __init__(self, app: ASGIApp, budget: SharedCapacity) -> None:
        self._app = app
        self._budget = budget

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        lease = scope[_LEASE_SCOPE_KEY] = MemoryLease(self._budget, tenant_of(scope).name)

        async def send_whole(message: Message) -> None:
            if lease.leased_bytes and message.get("body") and not message.get("more_body"):
                await send({**message, "more_body": True})
                message = {"type": "http.response.body", "body": b""}  # sent after the client has read the answer
            await send(message)

        try:
            await self._app(scope, receive, send_whole)
        finally:
            lease.release_lease()


def lease_of(scope: Scope) -> MemoryLease:
    lease = scope[_LEASE_SCOPE_KEY]
    assert isinstance(lease, MemoryLease)
    return lease


def grow_request_lease(scope: Scope, size: int) -> None:
    """Raises Overloaded."""
    lease_of(scope).grow_lease(size)
