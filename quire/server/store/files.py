"""Uploaded files and batch outputs: rows in the database, contents in a folder."""

from __future__ import annotations

import errno
import os
import shutil
import sqlite3
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from quire.engine.common import clock, random_source
from quire.engine.common.errors import InvalidRequest
from quire.server.shared_capacity import BytesByOwner, SharedCapacity
from quire.server.store.database import ROW_OVERHEAD_BYTES, Database, query_page

STORAGE_FULL_MESSAGE = "The stored files use all of --max-stored-size: delete some"
_FILE_COLUMNS = "id, created, expires, bytes, name, purpose"


@dataclass(frozen=True, slots=True)
class StoredFile:
    id: str
    created: int
    """Unix seconds."""
    expires: int | None
    """Unix seconds; None: never."""
    bytes: int
    name: str
    purpose: str


def new_file_id() -> str:
    return f"file-{random_source.token_hex(12)}"


def new_file(name: str, purpose: str, size: int, *, keep_seconds: int | None, id: str | None = None) -> StoredFile:
    now = int(clock.time())
    expires = None if keep_seconds is None else now + keep_seconds
    return StoredFile(id or new_file_id(), now, expires, size, name, purpose)


@dataclass(frozen=True, slots=True)
class _UploadReservation:
    owner: str
    size: int
    process: str


class FileContents:
    """Any process may read and write contents. When a process opens the data as its owner, it deletes contents without
    a row.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "files"

    def content_path(self, id: str) -> Path:
        return self.folder / id

    def write_content(self, id: str, content: BinaryIO) -> None:
        """Call this before Files.add. If it fails, no content remains."""
        self.create_empty_content(id)
        try:
            with self.content_path(id).open("r+b") as file:
                shutil.copyfileobj(content, file, 1 << 20)
                file.flush()
                os.fsync(file.fileno())
        except BaseException:
            self.content_path(id).unlink(missing_ok=True)
            raise

    def delete_contents(self, files: Iterable[StoredFile]) -> None:
        for each in files:
            self.content_path(each.id).unlink(missing_ok=True)

    def create_empty_content(self, id: str) -> None:
        os.close(os.open(self.content_path(id), os.O_CREAT | os.O_WRONLY | os.O_TRUNC | os.O_CLOEXEC, 0o600))


class Files:
    """Thread-safe. After a crash, a file is complete or absent."""

    def __init__(self, database: Database, max_bytes: int) -> None:
        """`max_bytes` bounds the files of all owners together. With API keys, an owner must leave as much free as it
        uses. Raises OSError.
        """
        self._database = database
        self.contents = FileContents(database.folder)
        self.contents.folder.mkdir(mode=0o700, exist_ok=True)
        self.sizes = BytesByOwner()
        self._budget = SharedCapacity(max_bytes, self.sizes)
        self._reservations: dict[str, _UploadReservation] = {}
        """Uploads in progress, by file id. Filled only in the process that owns the data."""
        with database.read_connection() as connection:
            rows = connection.execute("select owner, id, bytes from files").fetchall()
        for owner, _, size in rows:
            self._budget.adjust_held_amount(owner, size + ROW_OVERHEAD_BYTES)
        known_ids = {id for _, id, _ in rows}
        # A crash leaves contents without a row. If another process has written content but not yet added its row, its
        # `insert_files` raises, and the file is uploaded again.
        for path in self.contents.folder.iterdir():
            if path.name not in known_ids:
                path.unlink(missing_ok=True)

    @property
    def stored_bytes(self) -> int:
        return self._budget.total_used

    def try_reserve_bytes(self, owner: str, id: str, size: int, process: str) -> bool:
        """Reserves `size` bytes in total for the upload, until `add`, `release` or the end of `process`. If it returns
        False, an earlier reservation stays.
        """
        with self._database.read_connection():
            fits = size <= self._available_bytes(owner, id)
            if fits:
                self._reservations[id] = _UploadReservation(owner, size + ROW_OVERHEAD_BYTES, process)
            return fits

    def release(self, id: str) -> None:
        with self._database.read_connection():
            self._reservations.pop(id, None)

    def release_process_uploads(self, process: str) -> None:
        with self._database.read_connection():
            living = {id: each for id, each in self._reservations.items() if each.process != process}
            self._reservations = living

    def _available_bytes(self, owner: str, id: str) -> int:
        other_reservations = [each for other, each in self._reservations.items() if other != id]
        room = self._budget.available_to_owner(owner) - sum(each.size for each in other_reservations)
        if owner:  # see SharedCapacity.available_to_owner
            room -= sum(each.size for each in other_reservations if each.owner == owner)
        return room - ROW_OVERHEAD_BYTES

    def add(self, owner: str, file: StoredFile) -> None:
        """Raises OSError if the content is gone. Raises InvalidRequest if there is no room, which can happen only if
        the reservation was lost with an earlier owner of the data.
        """
        with self._database.write_transaction(self.sizes) as connection:
            reservation = self._reservations.get(file.id)
            if (
                reservation is None or reservation.size < file.bytes + ROW_OVERHEAD_BYTES
            ) and file.bytes > self._available_bytes(owner, file.id):
                raise InvalidRequest(STORAGE_FULL_MESSAGE, param="file")
            self.insert_files(connection, owner, [file])
            self._reservations.pop(file.id, None)

    def insert_files(self, connection: sqlite3.Connection, owner: str, files: Sequence[StoredFile]) -> None:
        """Call this in a transaction that includes `sizes`."""
        for file in files:
            if not self.contents.content_path(file.id).exists():
                raise FileNotFoundError(errno.ENOENT, _CONTENT_GONE_MESSAGE)
            row = (owner, file.id, file.created, file.expires, file.bytes, file.name, file.purpose)
            connection.execute("insert into files values (?, ?, ?, ?, ?, ?, ?)", row)
            self._budget.adjust_held_amount(owner, file.bytes + ROW_OVERHEAD_BYTES)

    def find(self, owner: str, id: str) -> StoredFile | None:
        with self._database.read_connection() as connection:
            query = f"select {_FILE_COLUMNS} from files where owner = ? and id = ? and {_NOT_EXPIRED}"
            row = connection.execute(query, (owner, id, clock.time())).fetchone()
        return None if row is None else StoredFile(*row)

    def page(
        self, owner: str, limit: int, *, newest_first: bool, after: str | None, purpose: str | None
    ) -> tuple[Sequence[StoredFile], bool] | None:
        """Returns files, and True if more follow; None if `after` is unknown."""
        now = clock.time()

        def is_unexpired(row: tuple[str, int, int | None, int, str, str]) -> bool:
            expires = row[2]
            return expires is None or expires > now

        query, values = f"select created, id, {_FILE_COLUMNS} from files where owner = ?", [owner]
        if purpose is not None:
            query, values = f"{query} and purpose = ?", [owner, purpose]
        page = query_page(self._database, query, values, limit, after, newest_first=newest_first, is_shown=is_unexpired)
        return None if page is None else ([StoredFile(*row) for row in page[0]], page[1])

    def delete(self, owner: str, id: str) -> bool:
        try:
            row = self._delete_row(owner, id)
        except sqlite3.OperationalError:  # disk full: deleting the content frees space
            if self.find(owner, id) is None:
                raise
            self.contents.content_path(id).unlink(missing_ok=True)
            row = self._delete_row(owner, id)
        if row is None:
            return False
        self.contents.content_path(id).unlink(missing_ok=True)
        return True

    def _delete_row(self, owner: str, id: str) -> tuple[int] | None:
        with self._database.write_transaction(self.sizes) as connection:
            query = "delete from files where owner = ? and id = ? returning bytes"
            row: tuple[int] | None = connection.execute(query, (owner, id)).fetchone()
            if row is not None:
                self._budget.adjust_held_amount(owner, -row[0] - ROW_OVERHEAD_BYTES)
            return row

    def list_expired_files(self, after: tuple[int, str, str] | None, limit: int) -> list[tuple[int, str, str]]:
        query = """select expires, owner, id from files where expires <= ? and (expires, owner, id) > (?, ?, ?)
            order by expires, owner, id limit ?"""
        with self._database.read_connection() as connection:
            return connection.execute(query, (clock.time(), *(after or (-1, "", "")), limit)).fetchall()


_CONTENT_GONE_MESSAGE = "the process that has data_dir was replaced before it knew of the file. Please try again"
_NOT_EXPIRED = "(expires is null or expires > ?)"
