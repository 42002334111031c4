"""What is deleted a few rows at a time: nobody sees it any more, but its rows still take room."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

from quire.server.budget import OwnerSizes
from quire.server.store.database import ROW, Database

BATCH_ROWS = 128
"""Rows that a transaction deletes at most, or inserts of an object with many."""
BATCH_BYTES = 512 << 10
"""The same in bytes; a single row may have more."""
OBJECTS = 32
"""Objects that a transaction deletes at most: each has entries in some indexes."""
Kind = Literal["items", "lines"]


class Garbage:
    """Threads may use it at the same time. Transactions that change it know of `sizes`."""

    def __init__(self, database: Database) -> None:
        self._database = database
        with database.reading() as connection:
            (size,) = connection.execute("select total(size) from garbage").fetchone()
        self.sizes = OwnerSizes({"": int(size)} if size else {})
        """Bytes of all of it; nobody's."""
        self._staged: set[int] = set()
        """Numbers of what is being put, which stays."""

    @property
    def size(self) -> int:
        return self.sizes.total()

    def add(self, connection: sqlite3.Connection, kind: Kind, owner: str, name: str, size: int) -> int:
        """Returns its number."""
        row = (kind, owner, name, size)
        cursor = connection.execute("insert into garbage (kind, owner, name, size) values (?, ?, ?, ?)", row)
        self.sizes.add("", size)
        assert cursor.lastrowid is not None
        return cursor.lastrowid

    def remove(self, connection: sqlite3.Connection, number: int) -> None:
        query = "delete from garbage where number = ? returning size"
        (size,) = connection.execute(query, (number,)).fetchone()
        self.sizes.add("", -size)

    @contextmanager
    def staging(self, owner: str, items_key: str) -> Iterator[Staging]:
        """Items that are put in several transactions. Unless the last one calls `finish`, they are deleted."""
        staging = Staging(self, owner, items_key, self._staged)
        try:
            yield staging
        finally:
            self._staged.discard(staging.number)

    def purge(self) -> bool:
        """Delete some rows, in one transaction. Returns whether there were any."""
        with self._database.reading() as connection:
            if self._oldest(connection) is None:
                return False
        with self._database.writing(self.sizes) as connection:
            return self.purge_in(connection)

    def purge_in(self, connection: sqlite3.Connection) -> bool:
        """The same as a part of a transaction."""
        oldest = self._oldest(connection)
        if oldest is None:
            return False
        number, kind, owner, name, size = oldest
        purge = _purge_items if kind == "items" else _purge_lines
        freed, is_empty = purge(connection, owner, name)
        if is_empty:
            self.remove(connection, number)
        else:
            freed = min(freed, size)
            connection.execute("update garbage set size = size - ? where number = ?", (freed, number))
            self.sizes.add("", -freed)
        return True

    def _oldest(self, connection: sqlite3.Connection) -> tuple[int, Kind, str, str, int] | None:
        query = "select number, kind, owner, name, size from garbage where number > 0 order by number limit ?"
        rows = connection.execute(query, (len(self._staged) + 1,)).fetchall()
        return next((row for row in rows if row[0] not in self._staged), None)


class Staging:
    """Items that nobody sees yet."""

    def __init__(self, garbage: Garbage, owner: str, items_key: str, staged: set[int]) -> None:
        self._garbage = garbage
        self._owner = owner
        self._items_key = items_key
        self._staged = staged
        self.number = 0
        """Among the garbage; 0: nothing was added yet."""

    def add(self, connection: sqlite3.Connection, size: int) -> None:
        """A part of the transaction that inserts items of this size."""
        if not self.number:
            self.number = self._garbage.add(connection, "items", self._owner, self._items_key, size)
            self._staged.add(self.number)
            return
        connection.execute("update garbage set size = size + ? where number = ?", (size, self.number))
        self._garbage.sizes.add("", size)

    def finish(self, connection: sqlite3.Connection) -> None:
        """A part of the transaction that shows them."""
        if self.number:
            self._garbage.remove(connection, self.number)


def _purge_items(connection: sqlite3.Connection, owner: str, items_key: str) -> tuple[int, bool]:
    """Delete some. Returns their bytes, and whether none are left."""
    query = "select place, length(data) from items where owner = ? and parent = ? order by place limit ?"
    rows = connection.execute(query, (owner, items_key, BATCH_ROWS)).fetchall()
    places, freed = _some(rows)
    delete = "delete from items where owner = ? and parent = ? and place = ?"
    connection.executemany(delete, ((owner, items_key, place) for place in places))
    return freed, len(places) == len(rows) < BATCH_ROWS


def _purge_lines(connection: sqlite3.Connection, _: str, batch: str) -> tuple[int, bool]:
    query = "select place, length(result) from lines where batch = ? order by place limit ?"
    rows = connection.execute(query, (batch, BATCH_ROWS)).fetchall()
    places, freed = _some(rows)
    connection.executemany("delete from lines where batch = ? and place = ?", ((batch, place) for place in places))
    return freed, len(places) == len(rows) < BATCH_ROWS


def _some(rows: list[tuple[int, int | None]]) -> tuple[list[int], int]:
    """The first rows that a transaction may delete, and their bytes."""
    places, freed = list[int](), 0
    for place, length in rows:
        size = ROW + (length or 0)
        if places and freed + size > BATCH_BYTES:
            break
        places.append(place)
        freed += size
    return places, freed
