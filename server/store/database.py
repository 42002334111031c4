"""The SQLite file in --data-dir, which one server at a time has."""

from __future__ import annotations

import fcntl
import os
import sqlite3
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from quire.engine.errors import ConfigError
from quire.server.store.schema import VERSION, prepare

FILE = "responses.sqlite3"
PATIENCE = 10.0
"""Seconds that a read or a write waits for another."""
ROW = 256
"""Bytes that a row counts beside what is in it, so that the bound of all bytes bounds the rows too."""


class Database:
    """Threads may use it at the same time: each `reading` and `writing` has it alone.

    A write is in the file when its block has ended: it survives the death of every process. A power cut may take the
    last ones, but leaves the file as it was before them (WAL with synchronous = normal)."""

    def __init__(self, folder: Path) -> None:
        """Raises ConfigError for a folder that cannot be used, or that another server uses."""
        self.folder = folder
        self.refusal = ""
        """Why the last write was refused; "" where it was not."""
        self._mutex = threading.Lock()
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._held = os.open(folder / "lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.close(os.open(folder / FILE, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600))
            self._file = _file(folder / FILE)
            self._connection = sqlite3.connect(
                folder / FILE, timeout=PATIENCE, check_same_thread=False, isolation_level=None
            )
            prepare(self._connection, ROW)
        except BlockingIOError:
            raise ConfigError("data_dir: another server uses this folder", param="data_dir") from None
        except (OSError, sqlite3.Error, ValueError) as error:
            raise ConfigError(f"data_dir: cannot keep anything in {folder}: {error}", param="data_dir") from None

    def close(self) -> None:
        with self._mutex:
            self._connection.close()
            os.close(self._held)

    @contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        with self._mutex:
            yield self._connection

    @contextmanager
    def writing(self, sizes: Counter[str] | None = None) -> Iterator[sqlite3.Connection]:
        """One transaction, of which nothing is left where the block raises, or where it cannot be committed. `sizes`:
        what the block counts of it."""
        with self._mutex, self._refused_or_not():
            if _file(self.folder / FILE) != self._file:  # SQLite would go on with what nobody finds any more
                raise sqlite3.OperationalError(f"{self.folder / FILE} was removed or replaced; start again")
            before = None if sizes is None else sizes.copy()
            self._connection.execute("begin immediate")
            try:
                yield self._connection
                self._connection.execute("commit")
            except BaseException:
                if self._connection.in_transaction:  # SQLite takes back itself what some errors end, but not all
                    self._connection.execute("rollback")
                if sizes is not None and before is not None:
                    sizes.clear()
                    sizes.update(before)
                raise

    def look(self) -> str:
        """Why nothing can be written now; "" where it can. After a refusal it is tried."""
        if self.refusal:
            with suppress(sqlite3.OperationalError), self.writing() as connection:
                connection.execute(f"pragma user_version = {VERSION}")  # as before, but it is written
        return self.refusal

    @contextmanager
    def _refused_or_not(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.OperationalError as error:
            self.refusal = str(error)
            raise
        self.refusal = ""


def page_of(
    database: sqlite3.Connection, query: str, given: Sequence[Any], limit: int, after: str | None, *, newest_first: bool
) -> tuple[list[Any], bool] | None:
    """The next rows of a query, `limit` at most, by their `created` and `id`, and whether others follow.

    `query`: `select ... from TABLE where owner = ? ...`, of which `given` are the values. The page begins behind the
    row with the id `after`. None where the owner has no such row.
    """
    sign, order = ("<", "desc") if newest_first else (">", "asc")
    if after is not None:
        table = query.partition(" from ")[2].split()[0]
        row = f"select created, id from {table} where owner = ? and id = ?"
        if (place := database.execute(row, (given[0], after)).fetchone()) is None:
            return None
        query, given = f"{query} and (created, id) {sign} (?, ?)", [*given, *place]
    rows = database.execute(f"{query} order by created {order}, id {order} limit ?", (*given, limit + 1)).fetchall()
    return rows[:limit], len(rows) > limit


def _file(path: Path) -> tuple[int, int] | None:
    """Which file is there; None: none is."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino
