"""The SQLite file in --data-dir, which one server at a time has."""

from __future__ import annotations

import fcntl
import os
import sqlite3
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from quire.engine.errors import ConfigError
from quire.server.budget import OwnerSizes
from quire.server.store.schema import VERSION, prepare

FILE = "responses.sqlite3"
PATIENCE = 10.0
"""Seconds that a read or a write waits for another."""
ROW = 256
"""Bytes that a row counts beside what is in it, so that the bound of all bytes bounds the rows too."""
LOG_BYTES = 4 << 20
"""`checkpoint` copies a write-ahead log that is longer."""
_MAX_LOG_PAGES = 16_384
"""A commit copies a log with so many pages itself: `checkpoint` comes too seldom, or readers keep it from its end."""
_CHUNK_ROWS = 500
"""Rows of a page that are read before others may go on."""


Connect = Callable[..., sqlite3.Connection]
"""Opens a file, as sqlite3.connect."""


class Database:
    """Threads may use it at the same time: each `reading` and `writing` has it alone, in the order in which they came.
    Whoever has much to do does it in several blocks, so that others wait for a few rows only.

    A write is in the file when its block has ended: it survives the death of every process. A power cut may take the
    last ones, but leaves the file as it was before them (WAL with synchronous = normal)."""

    def __init__(self, folder: Path, connect: Connect | None = None) -> None:
        """`connect`: in place of sqlite3.connect. Raises ConfigError for a folder that cannot be used, or that another
        server uses."""
        self.folder = folder
        self._connect = connect or sqlite3.connect
        self.refusal = ""
        """Why the last write was refused; "" where it was not."""
        self._lock = _TicketLock()
        self._checkpointing = threading.Lock()
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._held = os.open(folder / "lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.close(os.open(folder / FILE, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600))
            self._file = _file(folder / FILE)
            self._connection = self._open()
            self.upgraded = prepare(self._connection, ROW)
            """Whether an earlier version wrote the file."""
            self._connection.execute(f"pragma wal_autocheckpoint = {_MAX_LOG_PAGES}")
            self._connection.execute("pragma journal_size_limit = 0")  # so that the log's size says what is in it
            self._checkpointer = self._open()
        except BlockingIOError:
            raise ConfigError("data_dir: another server uses this folder", param="data_dir") from None
        except (OSError, sqlite3.Error, ValueError) as error:
            raise ConfigError(f"data_dir: cannot keep anything in {folder}: {error}", param="data_dir") from None

    def _open(self) -> sqlite3.Connection:
        return self._connect(self.folder / FILE, timeout=PATIENCE, check_same_thread=False, isolation_level=None)

    def close(self) -> None:
        with self._checkpointing:
            self._checkpointer.close()
        with self._lock:
            self._connection.close()
            os.close(self._held)

    def checkpoint(self) -> None:
        """Copy a long write-ahead log into the file, and wait for the disk, while others read and write."""
        with self._checkpointing, suppress(FileNotFoundError):
            if (self.folder / f"{FILE}-wal").stat().st_size > LOG_BYTES:
                self._checkpointer.execute("pragma wal_checkpoint(passive)").fetchall()

    @contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        with self._lock:
            yield self._connection

    @contextmanager
    def writing(self, *sizes: OwnerSizes) -> Iterator[sqlite3.Connection]:
        """One transaction, of which nothing is left where the block raises, or where it cannot be committed. `sizes`:
        what the block counts of it."""
        with self._lock, self._refused_or_not():
            if _file(self.folder / FILE) != self._file:  # SQLite would go on with what nobody finds any more
                raise sqlite3.OperationalError(f"{self.folder / FILE} was removed or replaced; start again")
            self._connection.execute("begin immediate")
            for each in sizes:
                each.begin()
            try:
                yield self._connection
                self._connection.execute("commit")
                for each in sizes:
                    each.commit()
            except BaseException:
                if self._connection.in_transaction:  # SQLite takes back itself what some errors end, but not all
                    self._connection.execute("rollback")
                for each in sizes:
                    each.revert()
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


class _TicketLock:
    """A lock that threads get in the order in which they asked for it. Of threading.Lock the thread that gives it back
    may have it again at once, however long others wait."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._waiting: deque[threading.Lock] = deque()
        self._taken = False

    def __enter__(self) -> None:
        with self._mutex:
            if not self._taken:
                self._taken = True
                return
            turn = threading.Lock()
            turn.acquire()
            self._waiting.append(turn)
        turn.acquire()

    def __exit__(self, *_: object) -> None:
        with self._mutex:
            if self._waiting:
                self._waiting.popleft().release()  # it stays taken
            else:
                self._taken = False


def page_of(
    database: Database,
    query: str,
    values: Sequence[Any],
    limit: int,
    after: str | None,
    *,
    newest_first: bool,
    is_shown: Callable[[Any], bool] = lambda row: True,
) -> tuple[list[Any], bool] | None:
    """The next rows of a query, at most `limit`, without their `created` and `id`, and whether others follow. A long
    page is read in several blocks, and `is_shown` leaves rows out after that: no block searches for rows to show.

    `query`: `select created, id, ... from TABLE where owner = ? ...` with `values`, over an index that ends with
    created and id. The page begins after the row with the id `after`. None if the owner has no such row.
    """
    sign, order = ("<", "desc") if newest_first else (">", "asc")
    start: tuple[float, str] = (float("inf"), "") if newest_first else (float("-inf"), "")
    if after is not None:
        table = query.partition(" from ")[2].split()[0]
        with database.reading() as connection:
            row = f"select created, id from {table} where owner = ? and id = ?"
            if (place := connection.execute(row, (values[0], after)).fetchone()) is None:
                return None
            start = place
    page = f"{query} and (created, id) {sign} (?, ?) order by created {order}, id {order} limit ?"
    rows: list[Any] = []
    while len(rows) <= limit:
        count = min(_CHUNK_ROWS, limit + 1 - len(rows))
        with database.reading() as connection:
            chunk = connection.execute(page, (*values, *start, count)).fetchall()
        rows += [row[2:] for row in chunk if is_shown(row[2:])]
        if len(chunk) < count:
            break
        start = chunk[-1][:2]
    return rows[:limit], len(rows) > limit


def _file(path: Path) -> tuple[int, int] | None:
    """Which file is there; None: none is."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino
