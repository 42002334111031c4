"""Stored responses are deleted some days after their creation, unless a stored one continues them."""

from __future__ import annotations

import logging
import sqlite3
import time

from quire.server.store.database import Database
from quire.server.store.garbage import BATCH_BYTES, BATCH_ROWS, OBJECTS
from quire.server.store.store import Store

log = logging.getLogger("quire.server")
DAY = 86_400.0


class Retention:
    """What an earlier version stored counts as created when this version first opened its file."""

    def __init__(self, database: Database, store: Store, seconds: float) -> None:
        """`seconds`: after its creation a response is deleted; 0: never."""
        self._store = store
        self._seconds = seconds
        with database.reading() as connection:
            row = connection.execute("select max(at) from upgrade").fetchone()
        self._upgraded: float = row[0] or 0.0
        self._place: tuple[float, int] | None = None
        """Where the next step goes on; None: at the newest response that is due."""
        if database.upgraded and seconds:
            self._announce(database)

    def step(self) -> bool:
        """Delete some of the responses that are due, in one transaction. Returns False after the last one. The newest
        go first, so that of a chain of responses all that are due go in one pass."""
        latest = time.time() - self._seconds
        if not self._seconds or latest < self._upgraded:
            return False
        place = self._place or (latest, 1 << 62)
        query = """select created, rowid, owner, id, size, count from objects
            where kind = 'response' and unfinished = 0 and (created, rowid) < (?, ?)
            order by created desc, rowid desc limit ?"""
        with self._store.transaction() as connection:
            rows = connection.execute(query, (*place, OBJECTS)).fetchall()
            num_rows = num_bytes = 0
            for created, rowid, owner, id, size, count in rows:
                if num_rows and (num_rows + count > BATCH_ROWS or num_bytes + size > BATCH_BYTES):
                    break
                place = (created, rowid)
                if not _is_continued(connection, owner, id):
                    self._store.drop(connection, owner, id)
                    num_rows += 1 + min(count, BATCH_ROWS)
                    num_bytes += size
        self._place = place if rows else None
        return bool(rows)

    def _announce(self, database: Database) -> None:
        with database.reading() as connection:
            query = "select count(*) from objects where kind = 'response' and unfinished = 0 and created <= 0"
            (count,) = connection.execute(query).fetchone()
        day = time.strftime("%Y-%m-%d", time.gmtime(self._upgraded + self._seconds))
        text = "data_dir: %d stored responses will be deleted on %s, %g days from now, but for those that a later one "
        text += "continues; --response-retention-days sets the time, 0 keeps all"
        log.warning(text, count, day, self._seconds / DAY)


def _is_continued(connection: sqlite3.Connection, owner: str, id: str) -> bool:
    query = "select 1 from objects where owner = ? and json_extract(about, '$.previous') = ? limit 1"
    return connection.execute(query, (owner, id)).fetchone() is not None
