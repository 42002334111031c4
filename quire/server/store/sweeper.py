"""Deletes data before its space is needed. A response does not expire while a later stored response continues it."""

from __future__ import annotations

import logging
import sqlite3
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from quire.engine.common import clock
from quire.server.store.database import Database
from quire.server.store.garbage import MAX_TRANSACTION_BYTES, MAX_TRANSACTION_OBJECTS, MAX_TRANSACTION_ROWS
from quire.server.store.response_store import Store

log = logging.getLogger("quire.server")
SECONDS_PER_DAY = 86_400.0
_MAX_STEPS = 16
EXPIRY_PAUSE_SECONDS = 60.0


class ResponseRetention:
    """Responses that an earlier version stored count as created at the upgrade."""

    def __init__(self, database: Database, store: Store, seconds: float) -> None:
        """`seconds`: maximum age; 0: unlimited."""
        self._store = store
        self._seconds = seconds
        with database.read_connection() as connection:
            row = connection.execute("select max(at) from upgrade").fetchone()
        self._upgraded_at: float = row[0] or 0.0
        self._position: tuple[float, int] | None = None
        """(created, rowid) to continue from; None: the newest due response."""
        if database.was_upgraded and seconds:
            self._log_upcoming_deletions(database)

    def delete_due_responses(self) -> bool:
        """Runs one transaction. Returns False if no response is due any more. Deletes the newest first, because a
        response stays while a later one continues it; so one pass deletes a whole chain of responses.
        """
        latest = clock.time() - self._seconds
        if not self._seconds or latest < self._upgraded_at:
            return False
        position = self._position or (latest, 1 << 62)
        with self._store.write_transaction_with_sizes() as connection:
            rows = _select_due_responses(connection, *position)
            num_rows = num_bytes = 0
            for created, rowid, owner, id, size, count in rows:
                if num_rows and (num_rows + count > MAX_TRANSACTION_ROWS or num_bytes + size > MAX_TRANSACTION_BYTES):
                    break
                position = (created, rowid)
                if not _is_continued(connection, owner, id):
                    self._store.delete_returning_created(connection, owner, id)
                    num_rows += 1 + min(count, MAX_TRANSACTION_ROWS)
                    num_bytes += size
        self._position = position if rows else None
        return bool(rows)

    def _log_upcoming_deletions(self, database: Database) -> None:
        with database.read_connection() as connection:
            query = "select count(*) from objects where kind = 'response' and unfinished = 0 and created <= 0"
            (count,) = connection.execute(query).fetchone()
        day = time.strftime("%Y-%m-%d", time.gmtime(self._upgraded_at + self._seconds))
        text = "data_dir: %d stored responses will be deleted on %s, %g days from now, but for those that a later one "
        text += "continues; --response-retention-days sets the time, 0 keeps all"
        log.warning(text, count, day, self._seconds / SECONDS_PER_DAY)


def _select_due_responses(
    connection: sqlite3.Connection, created: float, rowid: int
) -> list[tuple[float, int, str, str, int, int]]:
    """Uses two queries, because for `(created, rowid) < (?, ?)` SQLite would visit all rows with that `created`, such
    as all that an earlier version stored.
    """
    columns = "created, rowid, owner, id, size, count"
    finished = f"select {columns} from objects where kind = 'response' and unfinished = 0"
    same = f"{finished} and created = ? and rowid < ? order by rowid desc limit ?"
    rows = connection.execute(same, (created, rowid, MAX_TRANSACTION_OBJECTS)).fetchall()
    earlier = f"{finished} and created < ? order by created desc, rowid desc limit ?"
    return rows + connection.execute(earlier, (created, MAX_TRANSACTION_OBJECTS - len(rows))).fetchall()


def _is_continued(connection: sqlite3.Connection, owner: str, id: str) -> bool:
    query = "select 1 from objects where owner = ? and json_extract(about, '$.previous') = ? limit 1"
    return connection.execute(query, (owner, id)).fetchone() is not None


@dataclass(slots=True)
class SweepJob:
    run_step: Callable[[], bool]
    pause: float = 0.0
    not_before: float = 0.0


class Sweeper:
    def __init__(self, database: Database, jobs: Sequence[SweepJob]) -> None:
        self._database = database
        self._jobs = jobs
        self._mutex = threading.Lock()

    def sweep(self) -> bool:
        """Runs several transactions. Returns True if more data is due. While another call runs, does nothing and
        returns False.
        """
        if not self._mutex.acquire(blocking=False):
            return False
        try:
            unfinished = [job for job in self._jobs if self._run_job(job)]
            self._database.checkpoint()
            return bool(unfinished)
        finally:
            self._mutex.release()

    @staticmethod
    def _run_job(job: SweepJob) -> bool:
        if clock.monotonic() < job.not_before:
            return False
        for _ in range(_MAX_STEPS):
            if not job.run_step():
                job.not_before = clock.monotonic() + job.pause
                return False
        return True
