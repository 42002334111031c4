"""Batches: what was asked, how far it is, and the result of each line until they are written to a file."""

from __future__ import annotations

import sqlite3
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import msgspec
from msgspec.structs import replace

from quire.engine.errors import InvalidRequest
from quire.server.store.database import Database, page_of
from quire.server.store.files import Files, StoredFile

Status = Literal["validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"]
ENDED: tuple[Status, ...] = ("failed", "completed", "expired", "cancelled")
KEPT = 1000
"""Batches of a key that have ended and are still known; of more the oldest are forgotten, but not their files."""


class LineError(msgspec.Struct, frozen=True):
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
    status: Status = "validating"
    metadata: dict[str, str] | None = None
    keep_seconds: int | None = None
    """How long its files are kept; None: for ever."""
    errors: tuple[LineError, ...] = ()
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


class Line(NamedTuple):
    """One request of a batch."""

    place: int
    """Among those of its batch, in the order in which they are begun."""
    number: int
    """In the file, from 1."""
    start: int
    """In the file, in bytes."""
    length: int
    custom_id: str


class Result(NamedTuple):
    place: int
    failed: bool
    line: bytes
    """Of the output file, or of that of errors; JSON without its newline."""


class Batches:
    """Threads may use it at the same time; each method is one transaction."""

    def __init__(self, database: Database, files: Files) -> None:
        """`files`: where those of batches that end are made known."""
        self._database = database
        self._files = files

    def add(self, owner: str, batch: Batch, most: int) -> bool:
        """Add a batch, and forget the oldest ended ones beyond KEPT. False where `most` of the owner's are open."""
        row = (owner, batch.id, batch.created_at, batch.expires_at, batch.status, msgspec.json.encode(batch))
        ended = f"owner = ? and status in ({', '.join('?' * len(ENDED))})"
        with self._database.writing() as connection:
            counted = f"select count(*) from batches where owner = ? and status not in ({', '.join('?' * len(ENDED))})"
            if connection.execute(counted, (owner, *ENDED)).fetchone()[0] >= most:
                return False
            connection.execute("insert into batches values (?, ?, ?, ?, ?, ?)", row)
            oldest = f"select id from batches where {ended} order by created desc, id desc limit -1 offset ?"
            connection.execute(
                f"delete from batches where owner = ? and id in ({oldest})", (owner, owner, *ENDED, KEPT)
            )
            return True

    def cancel(self, owner: str, id: str) -> Batch | None:
        """None where there is none. Raises InvalidRequest for one that has ended or is about to."""
        return self._change(owner, id, _cancelling)

    def finalize(self, owner: str, id: str) -> None:
        """Note that all lines are answered and the files are being written, unless the batch is ending otherwise."""
        self._change(owner, id, _finalizing)

    def _change(
        self,
        owner: str,
        id: str,
        change: Callable[[Batch], Batch],
        also: Callable[[sqlite3.Connection], None] | None = None,
        sizes: Counter[str] | None = None,
    ) -> Batch | None:
        """Replace a batch by what `change` makes of it, and return that; None where there is none. `also` is part of
        the transaction, and changes `sizes`. The lines of a batch that has ended are forgotten."""
        with self._database.writing(sizes) as connection:
            before = _find(connection, owner, id)
            if before is None:
                return None
            batch = change(before)
            row = (batch.status, msgspec.json.encode(batch), owner, id)
            connection.execute("update batches set status = ?, data = ? where owner = ? and id = ?", row)
            if also is not None:
                also(connection)
            if batch.status in ENDED:
                connection.execute("delete from lines where batch = ?", (id,))
            return _counted(connection, batch)

    def end(self, owner: str, ended: Batch, files: Sequence[StoredFile]) -> bool:
        """Put a batch that has ended, and make its files known. False, and nothing is done, where it had ended before,
        as where two processes end it."""
        already = False

        def change(now: Batch) -> Batch:
            nonlocal already
            already = now.status in ENDED
            return now if already else ended

        def add(connection: sqlite3.Connection) -> None:
            if not already:
                self._files.insert(connection, owner, files)

        return self._change(owner, ended.id, change, add, self._files.sizes) is not None and not already

    def find(self, owner: str, id: str) -> Batch | None:
        with self._database.reading() as connection:
            found = _find(connection, owner, id)
            return None if found is None else _counted(connection, found)

    def page(self, owner: str, limit: int, after: str | None) -> tuple[Sequence[Batch], bool] | None:
        """The newest, behind the one with the id `after`, `limit` at most, and whether others follow. None where
        `after` is not one of them."""
        with self._database.reading() as connection:
            query = "select data from batches where owner = ?"
            page = page_of(connection, query, [owner], limit, after, newest_first=True)
            return None if page is None else ([_counted(connection, _batch(row)) for row in page[0]], page[1])

    def open(self) -> list[tuple[str, Batch]]:
        """Those that have not ended, with their owners, the oldest first."""
        query = f"select owner, data from batches where status not in ({', '.join('?' * len(ENDED))}) order by created"
        with self._database.reading() as connection:
            rows = connection.execute(query, ENDED).fetchall()
        return [(row[0], _batch(row[1:])) for row in rows]

    def set_lines(self, owner: str, batch: Batch, lines: Sequence[Line]) -> None:
        """Those of a batch that has been read, in place of what an earlier try put; the batch changes with them."""

        def insert(connection: sqlite3.Connection) -> None:
            connection.execute("delete from lines where batch = ?", (batch.id,))
            connection.executemany(
                "insert into lines (batch, place, number, start, length, custom_id) values (?, ?, ?, ?, ?, ?)",
                ((batch.id, *line) for line in lines),
            )

        self._change(owner, batch.id, lambda now: batch if now.status == "validating" else now, insert)

    def left(self, id: str, after: int, limit: int) -> list[Line]:
        """The next lines without a result, behind the one at the place `after`."""
        query = """select place, number, start, length, custom_id from lines
            where batch = ? and failed is null and place > ? order by place limit ?"""
        with self._database.reading() as connection:
            return [Line(*row) for row in connection.execute(query, (id, after, limit))]

    def put_result(self, id: str, result: Result) -> None:
        """Only the first of a line counts."""
        with self._database.writing() as connection:
            where = "batch = ? and place = ? and failed is null"
            row = (result.failed, result.line, id, result.place)
            connection.execute(f"update lines set failed = ?, result = ? where {where}", row)

    def results(self, id: str, after: int, *, failed: bool) -> list[tuple[int, bytes]]:
        """The next lines of a file, behind the one with this number in the input, with their numbers there."""
        query = "select number, result from lines where batch = ? and failed = ? and number > ? order by number"
        with self._database.reading() as connection:
            return connection.execute(f"{query} limit 16", (id, failed, after)).fetchall()


def at(batch: Batch, status: Status) -> Batch:
    """The batch as it is from now on."""
    return replace(batch, status=status, **{f"{status}_at": int(time.time())})


def _cancelling(batch: Batch) -> Batch:
    """Raises InvalidRequest for one that has ended or is about to."""
    if batch.status in (*ENDED, "finalizing"):
        raise InvalidRequest(f"batch_id: the batch is {batch.status} already", param="batch_id")
    return batch if batch.status == "cancelling" else at(batch, "cancelling")


def _finalizing(batch: Batch) -> Batch:
    return at(batch, "finalizing") if batch.status == "in_progress" else batch


def _find(connection: sqlite3.Connection, owner: str, id: str) -> Batch | None:
    row = connection.execute("select data from batches where owner = ? and id = ?", (owner, id)).fetchone()
    return None if row is None else _batch(row)


def _batch(row: tuple[bytes]) -> Batch:
    return msgspec.json.decode(row[0], type=Batch)


def _counted(connection: sqlite3.Connection, batch: Batch) -> Batch:
    """With the numbers of lines of one that is at work."""
    if batch.status in ENDED or batch.status == "validating":
        return batch
    query = "select count(*), count(failed), total(failed) from lines where batch = ?"
    total, ended, failed = connection.execute(query, (batch.id,)).fetchone()
    return msgspec.structs.replace(batch, total=total, completed=ended - int(failed), failed=int(failed))
