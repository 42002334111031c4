from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from quire.server.shared_capacity import BytesByOwner, SharedCapacity


@dataclass(eq=False, slots=True)
class _Waiter:
    owner: str
    granted: asyncio.Future[None]


class FairSemaphore:
    """Gives the next slot to the waiting owner with the fewest slots; among equals, to the least recently served."""

    def __init__(self, num_slots: int, *, reserves_for_others: bool = False) -> None:
        """If `reserves_for_others`, an owner must leave as many slots free as it uses."""
        self._slots_in_use = BytesByOwner()
        self._budget = SharedCapacity(num_slots, self._slots_in_use)
        self._num_slots = num_slots
        self._reserves_for_others = reserves_for_others
        self._waiters: list[_Waiter] = []
        self._num_granted = 0
        self._last_grants: dict[str, int] = {}

    @asynccontextmanager
    async def hold_slot(self, owner: str) -> AsyncIterator[None]:
        await self.acquire_slot(owner)
        try:
            yield
        finally:
            self.release_slot(owner)

    async def acquire_slot(self, owner: str) -> None:
        waiter = _Waiter(owner, asyncio.get_running_loop().create_future())
        self._waiters.append(waiter)
        self._grant_slots()
        try:
            await waiter.granted
        except asyncio.CancelledError:
            if waiter.granted.done() and not waiter.granted.cancelled():
                self.release_slot(owner)
            elif waiter in self._waiters:
                self._waiters.remove(waiter)
            self._drop_idle_owner(owner)
            raise

    def release_slot(self, owner: str) -> None:
        self._budget.adjust_held_amount(owner, -1)
        self._grant_slots()
        self._drop_idle_owner(owner)

    def _drop_idle_owner(self, owner: str) -> None:
        if not self._slots_in_use[owner] and all(waiter.owner != owner for waiter in self._waiters):
            self._last_grants.pop(owner, None)

    def _grant_slots(self) -> None:
        while candidates := [waiter for waiter in self._waiters if self._has_slot_for(waiter.owner)]:
            waiter = min(candidates, key=self._grant_sort_key)
            self._waiters.remove(waiter)
            if waiter.granted.cancelled():
                continue
            self._num_granted += 1
            self._last_grants[waiter.owner] = self._num_granted
            self._budget.adjust_held_amount(waiter.owner, 1)
            waiter.granted.set_result(None)

    def _grant_sort_key(self, waiter: _Waiter) -> tuple[int, int]:
        return self._slots_in_use[waiter.owner], self._last_grants.get(waiter.owner, 0)

    def _has_slot_for(self, owner: str) -> bool:
        return (
            self._budget.has_room(owner, 1) if self._reserves_for_others else self._budget.total_used < self._num_slots
        )
