"""Deletes rows that are no longer visible, a few at a time."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

from quire.server.shared_capacity import BytesByOwner
from quire.server.store.database import ROW_OVERHEAD_BYTES, Database

MAX_TRANSACTION_ROWS = 128
MAX_TRANSACTION_BYTES = 512 << 10
"""Maximum bytes of the rows that a transaction deletes or inserts, except that a single row may be larger."""
MAX_TRANSACTION_OBJECTS = 32
"""Smaller than MAX_TRANSACTION_ROWS, because each object has several index entries."""
GarbageKind = Literal["items", "lines"]


class Garbage:
    """Thread-safe. Transactions that change garbage must include `sizes`."""

    def __init__(self, database: Database) -> None:
        self._database = database
        with database.read_connection() as connection:
            (size,) = connection.execute("select total(size) from garbage").fetchone()
        self.sizes = BytesByOwner({"": int(size)} if size else {})
        """All bytes count for the owner ""."""
        self._unpublished_numbers: set[int] = set()
        """The items of these entries are still being written, and must not be purged."""

    @property
    def garbage_bytes(self) -> int:
        return self.sizes.total_bytes()

    def add_entry(self, connection: sqlite3.Connection, kind: GarbageKind, owner: str, name: str, size: int) -> int:
        row = (kind, owner, name, size)
        cursor = connection.execute("insert into garbage (kind, owner, name, size) values (?, ?, ?, ?)", row)
        self.sizes.add_bytes("", size)
        assert cursor.lastrowid is not None
        return cursor.lastrowid

    def remove_entry(self, connection: sqlite3.Connection, number: int) -> None:
        query = "delete from garbage where number = ? returning size"
        (size,) = connection.execute(query, (number,)).fetchone()
        self.sizes.add_bytes("", -size)

    @contextmanager
    def stage_unpublished_items(self, owner: str, items_key: str) -> Iterator[UnpublishedItems]:
        """Items that several transactions write are garbage, and are deleted later, unless the last transaction calls
        `publish_items`.
        """
        staging = UnpublishedItems(self, owner, items_key, self._unpublished_numbers)
        try:
            yield staging
        finally:
            self._unpublished_numbers.discard(staging.entry_number)

    def purge_rows(self) -> bool:
        with self._database.read_connection() as connection:
            if self._oldest_entry(connection) is None:
                return False
        with self._database.write_transaction(self.sizes) as connection:
            return self.purge_in_transaction(connection)

    def purge_in_transaction(self, connection: sqlite3.Connection) -> bool:
        oldest = self._oldest_entry(connection)
        if oldest is None:
            return False
        number, kind, owner, name, size = oldest
        purge = _purge_items if kind == "items" else _purge_lines
        freed, is_empty = purge(connection, owner, name)
        if is_empty:
            self.remove_entry(connection, number)
        else:
            freed = min(freed, size)
            connection.execute("update garbage set size = size - ? where number = ?", (freed, number))
            self.sizes.add_bytes("", -freed)
        return True

    def _oldest_entry(self, connection: sqlite3.Connection) -> tuple[int, GarbageKind, str, str, int] | None:
        query = "select number, kind, owner, name, size from garbage where number > 0 order by number limit ?"
        rows = connection.execute(query, (len(self._unpublished_numbers) + 1,)).fetchall()
        return next((row for row in rows if row[0] not in self._unpublished_numbers), None)


class UnpublishedItems:
    def __init__(self, garbage: Garbage, owner: str, items_key: str, unpublished_numbers: set[int]) -> None:
        self._garbage = garbage
        self._owner = owner
        self._items_key = items_key
        self._unpublished_numbers = unpublished_numbers
        self.entry_number = 0
        """0 until the first insert."""

    def record_inserted_bytes(self, connection: sqlite3.Connection, size: int) -> None:
        """Call this in the inserting transaction."""
        if not self.entry_number:
            self.entry_number = self._garbage.add_entry(connection, "items", self._owner, self._items_key, size)
            self._unpublished_numbers.add(self.entry_number)
            return
        connection.execute("update garbage set size = size + ? where number = ?", (size, self.entry_number))
        self._garbage.sizes.add_bytes("", size)

    def publish_items(self, connection: sqlite3.Connection) -> None:
        """Call this in the transaction that makes the items visible."""
        if self.entry_number:
            self._garbage.remove_entry(connection, self.entry_number)


def _purge_items(connection: sqlite3.Connection, owner: str, items_key: str) -> tuple[int, bool]:
    """Returns the bytes freed, and whether no items are left."""
    query = "select place, length(data) from items where owner = ? and parent = ? order by place limit ?"
    rows = connection.execute(query, (owner, items_key, MAX_TRANSACTION_ROWS)).fetchall()
    positions, freed = _take_deletable_rows(rows)
    delete = "delete from items where owner = ? and parent = ? and place = ?"
    connection.executemany(delete, ((owner, items_key, position) for position in positions))
    return freed, len(positions) == len(rows) < MAX_TRANSACTION_ROWS


def _purge_lines(connection: sqlite3.Connection, _: str, batch: str) -> tuple[int, bool]:
    query = "select place, length(result) from lines where batch = ? order by place limit ?"
    rows = connection.execute(query, (batch, MAX_TRANSACTION_ROWS)).fetchall()
    positions, freed = _take_deletable_rows(rows)
    connection.executemany(
        "delete from lines where batch = ? and place = ?", ((batch, position) for position in positions)
    )
    return freed, len(positions) == len(rows) < MAX_TRANSACTION_ROWS


def _take_deletable_rows(rows: list[tuple[int, int | None]]) -> tuple[list[int], int]:
    """Returns the positions of the first rows that fit the limits, and their total bytes."""
    positions, freed = list[int](), 0
    for position, length in rows:
        size = ROW_OVERHEAD_BYTES + (length or 0)
        if positions and freed + size > MAX_TRANSACTION_BYTES:
            break
        positions.append(position)
        freed += size
    return positions, freed
