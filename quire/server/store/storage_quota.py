"""Room for what is stored within its bound: made ahead of need, and a few rows at a time."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable

from quire.server.shared_capacity import BytesByOwner
from quire.server.store.database import Database
from quire.server.store.garbage import Garbage

EvictStep = Callable[[sqlite3.Connection, int], bool]
"""As a part of a transaction deletes some rows of the owner with most bytes, to free so many bytes if it can. Returns
whether there is more to look at."""
HARD_LIMIT_RATIO = 1.1
"""The share of the bound that is never passed by whoever leaves the rest to `sweep`."""
LOW_WATER_RATIO = 0.95
"""The share of the bound down to which `sweep` evicts: what comes in the meantime fits."""


class StorageQuota:
    """Threads may use it at the same time."""

    def __init__(
        self,
        database: Database,
        max_bytes: int,
        sizes: BytesByOwner,
        garbage: Garbage | None,
        new_eviction: Callable[[], EvictStep],
    ) -> None:
        """`sizes`: bytes by owner, beside those of `garbage`. `new_eviction`: begins to look for what is to be
        evicted."""
        self._database = database
        self._max_bytes = max_bytes
        self._sizes = sizes
        self._garbage = garbage
        self._new_eviction = new_eviction
        self._sweep_eviction = new_eviction()

    @property
    def used_bytes(self) -> int:
        return self._sizes.total_bytes() + (0 if self._garbage is None else self._garbage.garbage_bytes)

    def make_room(self, size: int, *, max_steps: int | None = None) -> None:
        """Evict until so many bytes more fit. The caller alone waits for it, and others go on between its transactions.
        It evicts no more than it adds: beyond the bound is at most what is put at the same time. `max_steps`: it leaves
        the rest to `evict_toward_low_water` after so many transactions, unless the bound is passed by a tenth."""
        freed = 0
        has_more = True
        evict = self._new_eviction()
        while has_more and freed < size and self.used_bytes + size > self._max_bytes:
            target = min(size - freed, self.used_bytes + size - self._max_bytes)
            has_more, freed_now = self._run_eviction_step(evict, target)
            freed += freed_now
            if max_steps is not None:
                max_steps -= 1
                if max_steps <= 0 and self.used_bytes + size <= HARD_LIMIT_RATIO * self._max_bytes:
                    break

    def evict_toward_low_water(self) -> bool:
        """Evict some, in one transaction, if the low-water mark is passed. Returns whether there is more to do."""
        over = self.used_bytes - int(LOW_WATER_RATIO * self._max_bytes)
        if over <= 0:
            self._sweep_eviction = self._new_eviction()
            return False
        return self._run_eviction_step(self._sweep_eviction, over)[0]

    def _run_eviction_step(self, evict: EvictStep, target: int) -> tuple[bool, int]:
        """Returns whether there is more to evict, and how many bytes were freed."""
        all_sizes = [self._sizes] if self._garbage is None else [self._sizes, self._garbage.sizes]
        with self._database.write_transaction(*all_sizes) as connection:
            before = self.used_bytes
            has_more = self._garbage is not None and self._garbage.purge_in_transaction(connection)
            if not has_more and self._sizes.total_bytes():
                has_more = evict(connection, target)
            return has_more, before - self.used_bytes
