"""The memory that requests occupy after their bodies have been parsed, until their answers have been sent."""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire.engine.errors import Overloaded
from quire.server.access.authentication import tenant_of
from quire.server.access.bodies import FREE_BYTES
from quire.server.budget import Budget

HELD_BYTES = 64 << 20
"""Of all requests. Sixty agents that send 100 KB of tools and instructions, which a response repeats, hold 18 MB."""
IMAGE_BYTES = 512 << 20
"""The same, beside that, where a model reads images: one in high resolution takes 13 MB until its answer has ended."""
_HOLD = "quire.hold"


class Hold:
    """The memory of one request. Up to FREE_BYTES are not counted: its connection has a buffer of that size."""

    __slots__ = ("_budget", "_counted", "_free", "_owner", "_size")

    def __init__(self, budget: Budget, owner: str, free: int = FREE_BYTES) -> None:
        self._budget = budget
        self._owner = owner
        self._free = free
        self._size = 0
        self._counted = 0

    @property
    def counted(self) -> int:
        """Bytes of the budget that it takes."""
        return self._counted

    def grow(self, size: int) -> None:
        """Hold `size` bytes more, until `end`. Raises Overloaded where others hold too much; one hold always fits."""
        counted = self._size + size if self._size + size > self._free else 0
        more = counted - self._counted
        if more and self._budget.held > self._counted and not self._budget.fits(self._owner, more):
            raise Overloaded(
                "Answers that wait for their end or for their readers take all the memory that is set aside"
            )
        self._size += size
        self._counted = counted
        self._budget.take(self._owner, more)

    def moved(self) -> Hold:
        """Another hold that has all of this one, which is empty then. It has no connection: each byte counts."""
        other = Hold(self._budget, self._owner, free=0)
        size = self._size
        self.end()
        other.grow(size)
        return other

    def end(self) -> None:
        self._budget.take(self._owner, -self._counted)
        self._size = self._counted = 0


class HeldMiddleware:
    """Gives every request a Hold, and ends it when the answer has been taken from the connection's buffer."""

    def __init__(self, app: ASGIApp, budget: Budget) -> None:
        self._app = app
        self._budget = budget

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        hold = scope[_HOLD] = Hold(self._budget, tenant_of(scope).name)

        async def send_whole(message: Message) -> None:
            if hold.counted and message.get("body") and not message.get("more_body"):
                await send({**message, "more_body": True})
                message = {"type": "http.response.body", "body": b""}  # sent when the client has read the rest
            await send(message)

        try:
            await self._app(scope, receive, send_whole)
        finally:
            hold.end()


def hold_of(scope: Scope) -> Hold:
    found = scope[_HOLD]
    assert isinstance(found, Hold)
    return found


def hold(scope: Scope, size: int) -> None:
    """Let a request hold `size` bytes more until it is answered. Raises Overloaded."""
    hold_of(scope).grow(size)
