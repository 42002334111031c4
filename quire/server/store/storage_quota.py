from __future__ import annotations

import sqlite3
from collections.abc import Callable

from quire.server.shared_capacity import BytesByOwner
from quire.server.store.database import Database
from quire.server.store.garbage import Garbage

EvictStep = Callable[[sqlite3.Connection, int], bool]
"""Deletes rows of the largest owner in a transaction, to free about the given number of bytes. Returns True if more can
be deleted.
"""
HARD_LIMIT_RATIO = 1.1
"""`make_room` with `max_steps` may leave used bytes up to this multiple of the bound."""
LOW_WATER_RATIO = 0.95
"""Background eviction goes down to this share of the bound, which leaves room for new data."""


class StorageQuota:
    def __init__(
        self,
        database: Database,
        max_bytes: int,
        sizes: BytesByOwner,
        garbage: Garbage | None,
        new_eviction: Callable[[], EvictStep],
    ) -> None:
        """`sizes` excludes the bytes of `garbage`."""
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
        """Evicts until `size` more bytes fit, but frees only about `size` bytes, so concurrent puts may exceed the
        bound. After `max_steps`, stops as soon as the bytes fit below HARD_LIMIT_RATIO, and leaves the rest to
        `evict_toward_low_water`.
        """
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
        over = self.used_bytes - int(LOW_WATER_RATIO * self._max_bytes)
        if over <= 0:
            self._sweep_eviction = self._new_eviction()
            return False
        return self._run_eviction_step(self._sweep_eviction, over)[0]

    def _run_eviction_step(self, evict: EvictStep, target: int) -> tuple[bool, int]:
        """Returns whether more can be evicted, and the bytes freed."""
        all_sizes = [self._sizes] if self._garbage is None else [self._sizes, self._garbage.sizes]
        with self._database.write_transaction(*all_sizes) as connection:
            before = self.used_bytes
            has_more = self._garbage is not None and self._garbage.purge_in_transaction(connection)
            if not has_more and self._sizes.total_bytes():
                has_more = evict(connection, target)
            return has_more, before - self.used_bytes
