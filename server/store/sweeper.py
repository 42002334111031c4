"""Deletes what is due ahead of need: what is evicted, what nobody sees any more, and what has expired."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from quire.server.store.calls import Calls
from quire.server.store.database import Database
from quire.server.store.garbage import Garbage
from quire.server.store.retention import Retention
from quire.server.store.store import Store

_STEPS = 16
"""Transactions of each kind that one call does at most."""
_PAUSE_SECONDS = 60.0
"""Between two passes over what has expired."""


@dataclass(slots=True)
class _Job:
    step: Callable[[], bool]
    """One transaction; returns whether there is more to do."""
    pause: float = 0.0
    """Seconds between two passes."""
    not_before: float = 0.0


class Sweeper:
    """Threads may use it at the same time: one at a time sweeps."""

    def __init__(self, database: Database, garbage: Garbage, store: Store, calls: Calls, retention: Retention) -> None:
        self._database = database
        self._jobs = (
            _Job(store.room.sweep),
            _Job(calls.room.sweep),
            _Job(garbage.purge),
            _Job(retention.step, _PAUSE_SECONDS),
            _Job(calls.sweep, _PAUSE_SECONDS),
        )
        self._mutex = threading.Lock()

    def sweep(self) -> bool:
        """Delete some. Returns whether there is more. Each step is a transaction of its own, and others go on between
        them."""
        if not self._mutex.acquire(blocking=False):
            return False
        try:
            unfinished = [job for job in self._jobs if self._run(job)]
            self._database.checkpoint()
            return bool(unfinished)
        finally:
            self._mutex.release()

    @staticmethod
    def _run(job: _Job) -> bool:
        if time.monotonic() < job.not_before:
            return False
        for _ in range(_STEPS):
            if not job.step():
                job.not_before = time.monotonic() + job.pause
                return False
        return True
