"""The SQLite file, used by one server at a time."""

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

from quire.engine.common.errors import ConfigError
from quire.server.shared_capacity import BytesByOwner
from quire.server.store.schema import SCHEMA_VERSION, prepare_database

DATABASE_FILE = "responses.sqlite3"
BUSY_TIMEOUT_SECONDS = 10.0
ROW_OVERHEAD_BYTES = 256
"""Added to each row's size, so that limits in bytes also limit the number of rows."""
CHECKPOINT_WAL_BYTES = 4 << 20
_AUTOCHECKPOINT_PAGES = 16_384
"""A commit copies the write-ahead log into the file when the log has this many pages, which happens if `checkpoint`
runs too rarely or readers block it.
"""
_CHUNK_ROWS = 500


SQLiteConnect = Callable[..., sqlite3.Connection]


class StoreUnreachable(sqlite3.OperationalError):
    """The process that owns the data does not answer, so the outcome of the call is unknown. Callers wait, as for a
    full disk.
    """


class Database:
    """Thread-safe. `read_connection` and `write_transaction` are exclusive and granted in order, so split long work.

    Writes survive a crash. A power cut may lose the last ones, but the file stays consistent (WAL, synchronous =
    normal).
    """

    def __init__(self, folder: Path, connect: SQLiteConnect | None = None) -> None:
        """Raises ConfigError if the folder is unusable or in use."""
        self.folder = folder
        self._connect = connect or sqlite3.connect
        self.write_error = ""
        """Error of the last write; empty if it succeeded."""
        self._lock = _TicketLock()
        self._checkpoint_lock = threading.Lock()
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._lock_file = os.open(folder / "lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.close(os.open(folder / DATABASE_FILE, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600))
            self._file_identity = _file_identity(folder / DATABASE_FILE)
            self._connection = self._open_connection()
            self.was_upgraded = prepare_database(self._connection, ROW_OVERHEAD_BYTES)
            self._connection.execute(f"pragma wal_autocheckpoint = {_AUTOCHECKPOINT_PAGES}")
            self._connection.execute("pragma journal_size_limit = 0")  # shrinks the log's file to its content
            self._checkpointer = self._open_connection()
        except BlockingIOError:
            raise ConfigError("data_dir: another server uses this folder", param="data_dir") from None
        except (OSError, sqlite3.Error, ValueError) as error:
            raise ConfigError(f"data_dir: cannot keep anything in {folder}: {error}", param="data_dir") from None

    def _open_connection(self) -> sqlite3.Connection:
        return self._connect(
            self.folder / DATABASE_FILE, timeout=BUSY_TIMEOUT_SECONDS, check_same_thread=False, isolation_level=None
        )

    def close(self) -> None:
        with self._checkpoint_lock:
            self._checkpointer.close()
        with self._lock:
            self._connection.close()
            os.close(self._lock_file)

    def checkpoint(self) -> None:
        """Others can read and write meanwhile."""
        with self._checkpoint_lock, suppress(FileNotFoundError):
            if (self.folder / f"{DATABASE_FILE}-wal").stat().st_size > CHECKPOINT_WAL_BYTES:
                self._checkpointer.execute("pragma wal_checkpoint(passive)").fetchall()

    @contextmanager
    def read_connection(self) -> Iterator[sqlite3.Connection]:
        with self._lock:
            yield self._connection

    @contextmanager
    def write_transaction(self, *sizes: BytesByOwner) -> Iterator[sqlite3.Connection]:
        """If the block fails, rolls back the transaction and restores `sizes`."""
        with self._lock, self._track_write_error():
            if (
                _file_identity(self.folder / DATABASE_FILE) != self._file_identity
            ):  # SQLite would continue on the deleted file
                raise sqlite3.OperationalError(f"{self.folder / DATABASE_FILE} was removed or replaced; start again")
            self._connection.execute("begin immediate")
            for each in sizes:
                each.begin_transaction()
            try:
                yield self._connection
                self._connection.execute("commit")
                for each in sizes:
                    each.commit()
            except BaseException:
                if self._connection.in_transaction:  # SQLite rolls back by itself only after some errors
                    self._connection.execute("rollback")
                for each in sizes:
                    each.revert()
                raise

    def probe_write_error(self) -> str:
        """Returns why writes fail now, or "". After a failed write, tries again."""
        if self.write_error:
            with suppress(sqlite3.OperationalError), self.write_transaction() as connection:
                connection.execute(f"pragma user_version = {SCHEMA_VERSION}")  # same value, but written
        return self.write_error

    @contextmanager
    def _track_write_error(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.OperationalError as error:
            self.write_error = str(error)
            raise
        self.write_error = ""


class _TicketLock:
    """With threading.Lock, one thread can starve the others."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._waiters: deque[threading.Lock] = deque()
        self._is_locked = False

    def __enter__(self) -> None:
        with self._mutex:
            if not self._is_locked:
                self._is_locked = True
                return
            turn = threading.Lock()
            turn.acquire()
            self._waiters.append(turn)
        turn.acquire()

    def __exit__(self, *_: object) -> None:
        with self._mutex:
            if self._waiters:
                self._waiters.popleft().release()  # stays locked for the next thread
            else:
                self._is_locked = False


def query_page(
    database: Database,
    query: str,
    values: Sequence[Any],
    limit: int,
    after: str | None,
    *,
    newest_first: bool,
    is_shown: Callable[[Any], bool] = lambda row: True,
) -> tuple[list[Any], bool] | None:
    """Returns rows without `created` and `id`, and True if more follow; None if `after` is unknown. `query`: `select
    created, id, ... from TABLE where owner = ? ...`, over an index that ends with created and id. `is_shown` filters
    rows after they are read, _CHUNK_ROWS at a time, so that the database is never locked for long.
    """
    sign, order = ("<", "desc") if newest_first else (">", "asc")
    start: tuple[float, str] = (float("inf"), "") if newest_first else (float("-inf"), "")
    if after is not None:
        table = query.partition(" from ")[2].split()[0]
        with database.read_connection() as connection:
            row = f"select created, id from {table} where owner = ? and id = ?"
            if (after_row := connection.execute(row, (values[0], after)).fetchone()) is None:
                return None
            start = after_row
    page = f"{query} and (created, id) {sign} (?, ?) order by created {order}, id {order} limit ?"
    rows: list[Any] = []
    while len(rows) <= limit:
        count = min(_CHUNK_ROWS, limit + 1 - len(rows))
        with database.read_connection() as connection:
            chunk = connection.execute(page, (*values, *start, count)).fetchall()
        rows += [row[2:] for row in chunk if is_shown(row[2:])]
        if len(chunk) < count:
            break
        start = chunk[-1][:2]
    return rows[:limit], len(rows) > limit


def _file_identity(path: Path) -> tuple[int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino
