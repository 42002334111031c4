from __future__ import annotations

import sqlite3
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import msgspec
from msgspec.structs import replace

from quire.engine.common import clock
from quire.engine.common.errors import InvalidRequest
from quire.server.store.database import Database, query_page
from quire.server.store.files import Files, StoredFile
from quire.server.store.garbage import MAX_TRANSACTION_ROWS, Garbage

BatchStatus = Literal[
    "validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"
]
TERMINAL_STATUSES: tuple[BatchStatus, ...] = ("failed", "completed", "expired", "cancelled")
MAX_ENDED_BATCHES = 1000
"""Limit per API key. The oldest ended batches above it are deleted; their files stay."""


_BATCHES_PER_READ = 100


class BatchError(msgspec.Struct, frozen=True):
    code: str
    message: str
    line: int | None = None
    param: str | None = None


class Batch(msgspec.Struct, frozen=True, kw_only=True):
    """Times are Unix seconds."""

    id: str
    endpoint: str
    input_file_id: str
    completion_window: str
    created_at: int
    expires_at: int
    status: BatchStatus = "validating"
    metadata: dict[str, str] | None = None
    keep_seconds: int | None = None
    """Seconds that its files are kept; None: unlimited."""
    errors: tuple[BatchError, ...] = ()
    output_file_id: str | None = None
    error_file_id: str | None = None
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    total: int = 0
    completed: int = 0
    failed: int = 0
    input_tokens: int = 0
    output_tokens: int = 0


class BatchLine(NamedTuple):
    position: int
    line_number: int
    """1-based."""
    byte_offset: int
    length: int
    custom_id: str


class LineResult(NamedTuple):
    position: int
    failed: bool
    line: bytes
    """JSON without the newline."""


class Batches:
    def __init__(self, database: Database, files: Files, garbage: Garbage) -> None:
        self._database = database
        self._files = files
        self._garbage = garbage

    def add(self, owner: str, batch: Batch, max_open: int) -> bool:
        """Also deletes ended batches above MAX_ENDED_BATCHES. Returns False, and adds nothing, if the owner has
        `max_open` open batches.
        """
        row = (owner, batch.id, batch.created_at, batch.expires_at, batch.status, msgspec.json.encode(batch))
        with self._database.write_transaction() as connection:
            opened = "select 1 from batches where owner = ? and ended = 0 limit ?"
            if len(connection.execute(opened, (owner, max_open)).fetchall()) >= max_open:
                return False
            connection.execute("insert into batches values (?, ?, ?, ?, ?, ?, 0)", row)
            oldest = """select id from batches where owner = ? and ended = 1
                order by created desc, id desc limit ? offset ?"""
            ids = connection.execute(oldest, (owner, MAX_TRANSACTION_ROWS, MAX_ENDED_BATCHES)).fetchall()
            connection.executemany("delete from batches where owner = ? and id = ?", ((owner, id) for (id,) in ids))
            return True

    def cancel(self, owner: str, id: str) -> Batch | None:
        """Returns None if the batch is unknown. Raises InvalidRequest if it has ended or is finalizing."""
        return self._update_batch(owner, id, _to_cancelling_or_raise)

    def mark_finalizing(self, owner: str, id: str) -> None:
        """Does nothing unless the batch is in progress."""
        self._update_batch(owner, id, _to_finalizing)

    def _update_batch(
        self,
        owner: str,
        id: str,
        transition: Callable[[Batch], Batch],
        in_transaction: Callable[[sqlite3.Connection], None] | None = None,
    ) -> Batch | None:
        with self._database.write_transaction(self._files.sizes, self._garbage.sizes) as connection:
            before = _select_batch(connection, owner, id)
            if before is None:
                return None
            batch = transition(before)
            ended = batch.status in TERMINAL_STATUSES
            row = (batch.status, msgspec.json.encode(batch), ended, owner, id)
            connection.execute("update batches set status = ?, data = ?, ended = ? where owner = ? and id = ?", row)
            if in_transaction is not None:
                in_transaction(connection)
            if ended and before.status not in TERMINAL_STATUSES:
                self._garbage.add_entry(connection, "lines", "", id, 0)
                connection.execute("delete from line_counts where batch = ?", (id,))
            return _with_line_counts(connection, batch)

    def end(self, owner: str, ended_batch: Batch, files: Sequence[StoredFile]) -> bool:
        was_ended = False

        def end_once(now: Batch) -> Batch:
            nonlocal was_ended
            was_ended = now.status in TERMINAL_STATUSES
            return now if was_ended else ended_batch

        def insert_batch_files(connection: sqlite3.Connection) -> None:
            if not was_ended:
                self._files.insert_files(connection, owner, files)

        return self._update_batch(owner, ended_batch.id, end_once, insert_batch_files) is not None and not was_ended

    def find(self, owner: str, id: str) -> Batch | None:
        with self._database.read_connection() as connection:
            batch = _select_batch(connection, owner, id)
            return None if batch is None else _with_line_counts(connection, batch)

    def page(self, owner: str, limit: int, after: str | None) -> tuple[Sequence[Batch], bool] | None:
        """Returns the newest first, and True if more follow; None if `after` is unknown."""
        query = "select created, id, data from batches where owner = ?"
        page = query_page(self._database, query, [owner], limit, after, newest_first=True)
        if page is None:
            return None
        with self._database.read_connection() as connection:
            return [_with_line_counts(connection, _decode_batch(row)) for row in page[0]], page[1]

    def list_open_batches(self) -> list[tuple[str, Batch]]:
        """Returns (owner, batch) pairs, oldest first."""
        query = """select owner, created, id, data from batches where ended = 0 and (owner, created, id) > (?, ?, ?)
            order by owner, created, id limit ?"""
        open_batches: list[tuple[str, Batch]] = []
        start: tuple[str, float, str] = ("", float("-inf"), "")
        while True:
            with self._database.read_connection() as connection:
                rows = connection.execute(query, (*start, _BATCHES_PER_READ)).fetchall()
            open_batches += [(row[0], _decode_batch(row[3:])) for row in rows]
            if len(rows) < _BATCHES_PER_READ:
                return sorted(open_batches, key=lambda each: each[1].created_at)
            start = rows[-1][:3]

    def is_file_in_use(self, owner: str, file_id: str) -> bool:
        query = "select data from batches where owner = ? and ended = 0 limit ?"
        with self._database.read_connection() as connection:
            rows = connection.execute(query, (owner, _BATCHES_PER_READ)).fetchall()
        return any(_decode_batch(row).input_file_id == file_id for row in rows)

    def store_lines_and_batch(self, owner: str, batch: Batch, lines: Sequence[BatchLine]) -> None:
        """Replaces the lines of an earlier attempt. Does nothing unless the stored batch is validating."""
        now = self.find(owner, batch.id)
        if now is None or now.status != "validating":
            return
        insert = (
            "insert or replace into lines (batch, place, number, start, length, custom_id) values (?, ?, ?, ?, ?, ?)"
        )
        for begin in range(0, len(lines), MAX_TRANSACTION_ROWS):
            with self._database.write_transaction() as connection:
                connection.executemany(
                    insert, ((batch.id, *line) for line in lines[begin : begin + MAX_TRANSACTION_ROWS])
                )

        is_validating = False

        def start_progress(now: Batch) -> Batch:
            nonlocal is_validating
            is_validating = now.status == "validating"
            return batch if is_validating else now

        def insert_line_counts(connection: sqlite3.Connection) -> None:
            if is_validating:
                connection.execute("insert or replace into line_counts values (?, 0, 0)", (batch.id,))

        self._update_batch(owner, batch.id, start_progress, insert_line_counts)

    def list_unanswered_lines(self, id: str, after: int, limit: int) -> list[BatchLine]:
        query = """select place, number, start, length, custom_id from lines
            where batch = ? and failed is null and place > ? order by place limit ?"""
        with self._database.read_connection() as connection:
            return [BatchLine(*row) for row in connection.execute(query, (id, after, limit))]

    def put_result(self, id: str, result: LineResult) -> None:
        """If the line already has a result, does nothing."""
        with self._database.write_transaction() as connection:
            where = "batch = ? and place = ? and failed is null"
            row = (result.failed, result.line, id, result.position)
            if connection.execute(f"update lines set failed = ?, result = ? where {where}", row).rowcount:
                column = "failed" if result.failed else "completed"
                connection.execute(f"update line_counts set {column} = {column} + 1 where batch = ?", (id,))

    def list_result_lines(self, id: str, after: int, *, failed: bool) -> list[tuple[int, bytes]]:
        query = "select number, result from lines where batch = ? and failed = ? and number > ? order by number"
        with self._database.read_connection() as connection:
            return connection.execute(f"{query} limit 16", (id, failed, after)).fetchall()


def with_batch_status(batch: Batch, status: BatchStatus) -> Batch:
    return replace(batch, status=status, **{f"{status}_at": int(clock.time())})


def _to_cancelling_or_raise(batch: Batch) -> Batch:
    if batch.status in (*TERMINAL_STATUSES, "finalizing"):
        raise InvalidRequest(f"batch_id: the batch is {batch.status} already", param="batch_id")
    return batch if batch.status == "cancelling" else with_batch_status(batch, "cancelling")


def _to_finalizing(batch: Batch) -> Batch:
    return with_batch_status(batch, "finalizing") if batch.status == "in_progress" else batch


def _select_batch(connection: sqlite3.Connection, owner: str, id: str) -> Batch | None:
    row = connection.execute("select data from batches where owner = ? and id = ?", (owner, id)).fetchone()
    return None if row is None else _decode_batch(row)


def _decode_batch(row: tuple[bytes]) -> Batch:
    return msgspec.json.decode(row[0], type=Batch)


def _with_line_counts(connection: sqlite3.Connection, batch: Batch) -> Batch:
    if batch.status in TERMINAL_STATUSES or batch.status == "validating":
        return batch
    query = "select completed, failed from line_counts where batch = ?"
    completed, failed = connection.execute(query, (batch.id,)).fetchone() or (0, 0)
    return msgspec.structs.replace(batch, completed=completed, failed=failed)
