"""Turns of a few at a time, which the keys of a server take one after the other."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from quire.server.budget import Budget, OwnerSizes


@dataclass(eq=False, slots=True)
class _Waiter:
    owner: str
    granted: asyncio.Future[None]


class FairTurns:
    """`count` turns at the same time. The owner who has the fewest is next; of those who have as many, the one who got
    his last one earliest. An owner is a tenant's name, empty on a server without keys."""

    def __init__(self, count: int, *, reserves: bool = False) -> None:
        """`reserves`: a key gets a turn only while as many are left to others as it has; for turns that take long."""
        self._running = OwnerSizes()
        self._budget = Budget(count, self._running)
        self._count = count
        self._reserves = reserves
        self._waiting: list[_Waiter] = []
        self._num_granted = 0
        self._granted: dict[str, int] = {}
        """By owners that wait or have a turn: the number of the last one they got."""

    @asynccontextmanager
    async def turn(self, owner: str) -> AsyncIterator[None]:
        """The block runs in a turn of the owner's."""
        await self.acquire(owner)
        try:
            yield
        finally:
            self.release(owner)

    async def acquire(self, owner: str) -> None:
        waiter = _Waiter(owner, asyncio.get_running_loop().create_future())
        self._waiting.append(waiter)
        self._grant()
        try:
            await waiter.granted
        except asyncio.CancelledError:
            if waiter.granted.done() and not waiter.granted.cancelled():
                self.release(owner)
            elif waiter in self._waiting:
                self._waiting.remove(waiter)
            self._forget(owner)
            raise

    def release(self, owner: str) -> None:
        self._budget.take(owner, -1)
        self._grant()
        self._forget(owner)

    def _forget(self, owner: str) -> None:
        if not self._running[owner] and all(waiter.owner != owner for waiter in self._waiting):
            self._granted.pop(owner, None)

    def _grant(self) -> None:
        while candidates := [waiter for waiter in self._waiting if self._fits(waiter.owner)]:
            waiter = min(candidates, key=self._order)
            self._waiting.remove(waiter)
            if waiter.granted.cancelled():  # who waited has left, and is about to hear of it
                continue
            self._num_granted += 1
            self._granted[waiter.owner] = self._num_granted
            self._budget.take(waiter.owner, 1)
            waiter.granted.set_result(None)

    def _order(self, waiter: _Waiter) -> tuple[int, int]:
        return self._running[waiter.owner], self._granted.get(waiter.owner, 0)

    def _fits(self, owner: str) -> bool:
        return self._budget.fits(owner, 1) if self._reserves else self._budget.held < self._count
