"""Batches: what was asked, how far it is, and the result of each line until they are written to a file."""

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
"""Batches of a key that have ended and are still known; of more the oldest are forgotten, but not their files."""


_BATCHES_PER_READ = 100
"""Batches that are read at once."""


class BatchError(msgspec.Struct, frozen=True):
    """Why a batch has failed."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


class Batch(msgspec.Struct, frozen=True, kw_only=True):
    """Times are seconds of the Unix clock."""

    id: str
    endpoint: str
    input_file_id: str
    completion_window: str
    created_at: int
    expires_at: int
    status: BatchStatus = "validating"
    metadata: dict[str, str] | None = None
    keep_seconds: int | None = None
    """How long its files are kept; None: for ever."""
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
    """One request of a batch."""

    position: int
    """Among those of its batch, in the order in which they are begun."""
    line_number: int
    """In the file, from 1."""
    byte_offset: int
    """In the file, in bytes."""
    length: int
    custom_id: str


class LineResult(NamedTuple):
    position: int
    failed: bool
    line: bytes
    """Of the output file, or of that of errors; JSON without its newline."""


class Batches:
    """Threads may use it at the same time; each method is one transaction, but for those that put many lines, or read
    many batches."""

    def __init__(self, database: Database, files: Files, garbage: Garbage) -> None:
        """`files`: where those of batches that end are made known. `garbage`: where their lines go."""
        self._database = database
        self._files = files
        self._garbage = garbage

    def add(self, owner: str, batch: Batch, max_open: int) -> bool:
        """Add a batch, and forget the oldest ended ones beyond KEPT. False where `max_open` of the owner's are open."""
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
        """None where there is none. Raises InvalidRequest for one that has ended or is about to."""
        return self._update_batch(owner, id, _to_cancelling_or_raise)

    def mark_finalizing(self, owner: str, id: str) -> None:
        """Note that all lines are answered and the files are being written, unless the batch is ending otherwise."""
        self._update_batch(owner, id, _to_finalizing)

    def _update_batch(
        self,
        owner: str,
        id: str,
        transition: Callable[[Batch], Batch],
        in_transaction: Callable[[sqlite3.Connection], None] | None = None,
    ) -> Batch | None:
        """Replace a batch by what `transition` makes of it, and return that; None where there is none. `in_transaction`
        is part of the transaction. The lines of a batch that has ended are deleted later."""
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
        """Put a batch that has ended, and make its files known. False, and nothing is done, where it had ended before,
        as where two processes end it."""
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
        """The newest, behind the one with the id `after`, `limit` at most, and whether others follow. None where
        `after` is not one of them."""
        query = "select created, id, data from batches where owner = ?"
        page = query_page(self._database, query, [owner], limit, after, newest_first=True)
        if page is None:
            return None
        with self._database.read_connection() as connection:
            return [_with_line_counts(connection, _decode_batch(row)) for row in page[0]], page[1]

    def list_open_batches(self) -> list[tuple[str, Batch]]:
        """Those that have not ended, with their owners, the oldest first."""
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
        """Whether a batch of the owner that has not ended reads a file."""
        query = "select data from batches where owner = ? and ended = 0 limit ?"
        with self._database.read_connection() as connection:
            rows = connection.execute(query, (owner, _BATCHES_PER_READ)).fetchall()
        return any(_decode_batch(row).input_file_id == file_id for row in rows)

    def store_lines_and_batch(self, owner: str, batch: Batch, lines: Sequence[BatchLine]) -> None:
        """Those of a batch that has been read, in place of what an earlier try put; the batch changes with them."""
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
        """The next lines without a result, behind the one at the place `after`."""
        query = """select place, number, start, length, custom_id from lines
            where batch = ? and failed is null and place > ? order by place limit ?"""
        with self._database.read_connection() as connection:
            return [BatchLine(*row) for row in connection.execute(query, (id, after, limit))]

    def put_result(self, id: str, result: LineResult) -> None:
        """Only the first of a line counts."""
        with self._database.write_transaction() as connection:
            where = "batch = ? and place = ? and failed is null"
            row = (result.failed, result.line, id, result.position)
            if connection.execute(f"update lines set failed = ?, result = ? where {where}", row).rowcount:
                column = "failed" if result.failed else "completed"
                connection.execute(f"update line_counts set {column} = {column} + 1 where batch = ?", (id,))

    def list_result_lines(self, id: str, after: int, *, failed: bool) -> list[tuple[int, bytes]]:
        """The next lines of a file, behind the one with this number in the input, with their numbers there."""
        query = "select number, result from lines where batch = ? and failed = ? and number > ? order by number"
        with self._database.read_connection() as connection:
            return connection.execute(f"{query} limit 16", (id, failed, after)).fetchall()


def with_batch_status(batch: Batch, status: BatchStatus) -> Batch:
    """The batch as it is from now on."""
    return replace(batch, status=status, **{f"{status}_at": int(clock.time())})


def _to_cancelling_or_raise(batch: Batch) -> Batch:
    """Raises InvalidRequest for one that has ended or is about to."""
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
    """With the numbers of lines of one that is at work."""
    if batch.status in TERMINAL_STATUSES or batch.status == "validating":
        return batch
    query = "select completed, failed from line_counts where batch = ?"
    completed, failed = connection.execute(query, (batch.id,)).fetchone() or (0, 0)
    return msgspec.structs.replace(batch, completed=completed, failed=failed)
