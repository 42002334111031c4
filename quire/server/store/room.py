"""Room for what is stored within its bound: made ahead of need, and a few rows at a time."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable

from quire.server.budget import OwnerSizes
from quire.server.store.database import Database
from quire.server.store.garbage import Garbage

Evict = Callable[[sqlite3.Connection, int], bool]
"""As a part of a transaction deletes some rows of the owner with most bytes, to free so many bytes if it can. Returns
whether there is more to look at."""
MOST = 1.1
"""The share of the bound that is never passed by whoever leaves the rest to `sweep`."""
LOW_WATER = 0.95
"""The share of the bound down to which `sweep` evicts: what comes in the meantime fits."""


class Room:
    """Threads may use it at the same time."""

    def __init__(
        self,
        database: Database,
        max_bytes: int,
        sizes: OwnerSizes,
        garbage: Garbage | None,
        eviction: Callable[[], Evict],
    ) -> None:
        """`sizes`: bytes by owner, beside those of `garbage`. `eviction`: begins to look for what is to be evicted."""
        self._database = database
        self._max_bytes = max_bytes
        self._sizes = sizes
        self._garbage = garbage
        self._eviction = eviction
        self._sweeping = eviction()

    @property
    def used(self) -> int:
        return self._sizes.total() + (0 if self._garbage is None else self._garbage.size)

    def make(self, size: int, *, steps: int | None = None) -> None:
        """Evict until so many bytes more fit. The caller alone waits for it, and others go on between its transactions.
        It evicts no more than it adds: beyond the bound is at most what is put at the same time. `steps`: it leaves the
        rest to `sweep` after so many transactions, unless the bound is passed by a tenth."""
        freed, more, evict = 0, True, self._eviction()
        while more and freed < size and self.used + size > self._max_bytes:
            target = min(size - freed, self.used + size - self._max_bytes)
            more, freed_now = self._step(evict, target)
            freed += freed_now
            if steps is not None:
                steps -= 1
                if steps <= 0 and self.used + size <= MOST * self._max_bytes:
                    break

    def sweep(self) -> bool:
        """Evict some, in one transaction, if the low-water mark is passed. Returns whether there is more to do."""
        over = self.used - int(LOW_WATER * self._max_bytes)
        if over <= 0:
            self._sweeping = self._eviction()
            return False
        return self._step(self._sweeping, over)[0]

    def _step(self, evict: Evict, target: int) -> tuple[bool, int]:
        """Returns whether there is more to evict, and how many bytes were freed."""
        known = [self._sizes] if self._garbage is None else [self._sizes, self._garbage.sizes]
        with self._database.writing(*known) as connection:
            before = self.used
            more = self._garbage is not None and self._garbage.purge_in(connection)
            if not more and self._sizes.total():
                more = evict(connection, target)
            return more, before - self.used
