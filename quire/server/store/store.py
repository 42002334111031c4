"""What the Responses API keeps: responses and conversations, in SQLite under --data-dir, each its owner's alone.

An object is a row, and so is each of its items: those of a response's input, or of a conversation. Both are kept as the
JSON that answers give: most of these only repeat bytes, and none needs more than its own page.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

from quire.engine import clock, random_source
from quire.engine.errors import InvalidRequest
from quire.server.budget import OwnerSizes
from quire.server.encoding import encode_json
from quire.server.store.database import FILE, PATIENCE, ROW, Connect, Database
from quire.server.store.garbage import BATCH_BYTES, BATCH_ROWS, OBJECTS, Garbage
from quire.server.store.room import Room

PAGE_BYTES = 4 << 20
"""A page of items ends behind the one that reaches it: 100 large ones would be 400 MB in one answer."""
_ROW = "id, coalesce(items_key, id), size, count, length(data), created"
"""Columns of an object that is deleted."""
Kind = Literal["response", "conversation"]


class Item(NamedTuple):
    """An item of an input or a conversation."""

    id: str
    data: bytes
    """JSON."""


class Bounds(NamedTuple):
    """Of a conversation."""

    items: int
    size: int
    """Bytes that it takes in the store, its items included."""


def size_of(items: Iterable[Item]) -> int:
    """Bytes that they take in the store."""
    return sum(len(item.data) + ROW for item in items)


@dataclass(frozen=True, slots=True)
class Stored:
    """An object, without its items."""

    kind: Kind
    about: dict[str, Any]
    """What the server wants to know of it, a few fields."""
    data: bytes
    """The object as answers give it: JSON."""


@dataclass(frozen=True, slots=True)
class ItemSummary:
    """What is known of an object without reading it."""

    about: dict[str, Any]
    length: int
    """Bytes of its JSON."""
    size: int
    """Bytes that it takes in the store, its items included."""
    count: int
    """Of its items."""


@dataclass(frozen=True, slots=True)
class Page:
    items: Sequence[Item]
    more: bool
    """Whether others follow."""


@dataclass(frozen=True, slots=True)
class Put:
    """An object to store, in place of the one with this id."""

    id: str
    stored: Stored
    items: Sequence[Item] = field(default=())
    unfinished: bool = False
    """Whether it is being worked on in this process, and will never end in another."""


class Store:
    """Objects by their owner and id. Threads may use it at the same time; others see all of what a method does, or
    nothing. What has many rows is put and deleted some rows at a time, each time in a transaction of its own.

    When they take more than `max_bytes` together, the oldest of the owner with most bytes are evicted; responses that
    have not ended last, for nobody has them yet.
    """

    def __init__(self, database: Database, garbage: Garbage, max_bytes: int) -> None:
        self._database = database
        self._garbage = garbage
        with database.reading() as connection:
            sizes = connection.execute("select owner, sum(size) from objects group by owner").fetchall()
        self._sizes = OwnerSizes({owner: int(size) for owner, size in sizes})
        self.room = Room(database, max_bytes, self._sizes, garbage, lambda: self._evict)

    @property
    def size(self) -> int:
        """Bytes of all that is kept, and of what is not yet deleted."""
        return self.room.used

    def get(self, owner: str, kind: Kind, id: str) -> Stored | None:
        with self._database.reading() as database:
            return _get(database, owner, kind, id)

    def known(self, owner: str, kind: Kind, id: str) -> ItemSummary | None:
        with self._database.reading() as database:
            return _known(database, owner, kind, id)

    def put(self, owner: str, new: Put) -> None:
        stored, items_key = new.stored, random_source.token_hex(8)
        size = ROW + len(stored.data) + size_of(new.items)
        self.room.make(size)
        *chunks, last = _chunks(new.items)
        place = 0
        with self._garbage.staging(owner, items_key) as staging:
            for chunk in chunks:
                with self._database.writing(self._garbage.sizes) as database:
                    staging.add(database, size_of(chunk))
                    _insert(database, owner, items_key, chunk, place)
                place += len(chunk)
            with self.transaction() as database:
                staging.finish(database)
                now = clock.time()
                created = self.drop(database, owner, new.id)
                row = (owner, new.id, stored.kind, now, new.unfinished, size, len(new.items))
                database.execute(
                    "insert into objects values (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                    (*row, json.dumps(stored.about), stored.data, now if created is None else created, items_key),
                )
                _insert(database, owner, items_key, last, place)
                self._sizes.add(owner, size)

    def append(self, owner: str, id: str, items: Sequence[Item], most: Bounds | None = None) -> bool:
        """Add items behind the others of a conversation. Whether there is one. Raises what check_room raises."""
        if (known := self.known(owner, "conversation", id)) is None:
            return False
        if most is not None:
            check_room(known, items, most, "items")
        self.room.make(size_of(items))
        with self.transaction() as database:
            known = _known(database, owner, "conversation", id)
            if known is None:
                return False
            if most is not None:
                check_room(known, items, most, "items")
            items_key = _items_key(database, owner, id)
            last = "select max(place) from items where owner = ? and parent = ?"
            place = database.execute(last, (owner, items_key)).fetchone()[0]
            _insert(database, owner, items_key, items, 0 if place is None else place + 1)
            self._grow(database, owner, id, size_of(items), len(items))
            return True

    def describe(self, owner: str, id: str, metadata: Any) -> bytes | None:
        """Replace a conversation's metadata. Returns the conversation as JSON; None where there is none."""
        with self.transaction() as database:
            stored = _get(database, owner, "conversation", id)
            if stored is None:
                return None
            data = encode_json({**json.loads(stored.data), "metadata": metadata})
            database.execute("update objects set data = ? where owner = ? and id = ?", (data, owner, id))
            self._grow(database, owner, id, len(data) - len(stored.data), 0)
            return data

    def page(self, owner: str, id: str, limit: int, *, newest_first: bool, after: str | None) -> Page | None:
        """The next items of an object, `limit` at most, behind the one with the id `after`. None where `after` is not
        one of them."""
        sign, order = ("<", "desc") if newest_first else (">", "asc")
        with self._database.reading() as database:
            where, given = "owner = ? and parent = ?", [owner, _items_key(database, owner, id)]
            if after is not None:
                place = database.execute(f"select place from items where {where} and id = ?", (*given, after))
                if (found := place.fetchone()) is None:
                    return None
                where, given = f"{where} and place {sign} ?", [*given, found[0]]
            query = f"select id, data from items where {where} order by place {order} limit ?"
            items: list[Item] = []
            with closing(database.execute(query, (*given, limit + 1))) as rows:
                size = 0
                for row in rows:
                    if len(items) == limit or size >= PAGE_BYTES:
                        return Page(items, more=True)
                    items.append(Item(*row))
                    size += len(items[-1].data)
            return Page(items, more=False)

    def item(self, owner: str, id: str, item_id: str) -> bytes | None:
        with self._database.reading() as database:
            query = "select data from items where owner = ? and parent = ? and id = ?"
            row = database.execute(query, (owner, _items_key(database, owner, id), item_id)).fetchone()
            return None if row is None else bytes(row[0])

    def delete_item(self, owner: str, id: str, item_id: str) -> bool:
        """Whether there was one."""
        with self.transaction() as database:
            where = "from items where owner = ? and parent = ? and id = ?"
            key = (owner, _items_key(database, owner, id), item_id)
            row = database.execute(f"select length(data) {where}", key).fetchone()
            if row is not None:
                database.execute(f"delete {where}", key)
                self._grow(database, owner, id, -row[0] - ROW, -1)
            return row is not None

    def delete(self, owner: str, id: str) -> bool:
        """Whether there was one."""
        with self.transaction() as database:
            return self.drop(database, owner, id) is not None

    def unfinished(self) -> list[tuple[str, str]]:
        """Owners and ids of the responses that are being worked on, or were when a process ended."""
        with self._database.reading() as database:
            return database.execute("select owner, id from objects where unfinished = 1").fetchall()

    def lose(self, owner: str, id: str) -> None:
        """No process can go on with this response: it has failed. Its items stay."""
        with self.transaction() as database:
            if (before := _get(database, owner, "response", id)) is None:
                return
            now = _lost(before)
            row = (json.dumps(now.about), now.data, owner, id)
            database.execute("update objects set about = ?, data = ?, unfinished = 0 where owner = ? and id = ?", row)
            self._grow(database, owner, id, len(now.data) - len(before.data), 0)

    def _grow(self, database: sqlite3.Connection, owner: str, id: str, size: int, count: int) -> None:
        grown = "update objects set size = size + ?, count = count + ?, at = ? where owner = ? and id = ?"
        database.execute(grown, (size, count, clock.time(), owner, id))
        self._sizes.add(owner, size)

    def transaction(self) -> AbstractContextManager[sqlite3.Connection]:
        """That puts or deletes objects."""
        return self._database.writing(self._sizes, self._garbage.sizes)

    def drop(self, database: sqlite3.Connection, owner: str, id: str) -> float | None:
        """Delete an object as a part of a transaction. Nobody sees it any more; if it has many rows, these are deleted
        later. Returns when it was created; None if there is none."""
        query = f"select {_ROW} from objects where owner = ? and id = ?"
        row = database.execute(query, (owner, id)).fetchone()
        if row is None:
            return None
        self._drop(database, owner, *row)
        return float(row[-1])

    def _drop(
        self,
        database: sqlite3.Connection,
        owner: str,
        id: str,
        items_key: str,
        size: int,
        count: int,
        length: int,
        _: float,
    ) -> None:
        items_size = size - ROW - length
        if count > BATCH_ROWS or items_size > BATCH_BYTES:
            self._garbage.add(database, "items", owner, items_key, max(items_size, 0))
        elif count:
            database.execute("delete from items where owner = ? and parent = ?", (owner, items_key))
        database.execute("delete from objects where owner = ? and id = ?", (owner, id))
        self._sizes.add(owner, -size)

    def _evict(self, database: sqlite3.Connection, target: int) -> bool:
        """As Room asks for it."""
        owner, freed, rows = self._sizes.largest(), 0, 0
        query = f"select {_ROW} from objects where owner = ? order by unfinished, at limit ?"
        for row in database.execute(query, (owner, OBJECTS)).fetchall():
            self._drop(database, owner, *row)
            _, _, size, count, *_ = row
            freed += size
            rows += count
            if freed >= min(target, BATCH_BYTES) or rows >= BATCH_ROWS or self._sizes.largest() != owner:
                break
        return True


def check_room(known: ItemSummary, items: Sequence[Item], most: Bounds, param: str) -> None:
    """Refuse to add items to a conversation that would be too large with them. Those of a response that is computed
    are added anyway, so it may grow beyond the bound by what is under way. Raises InvalidRequest."""
    if known.count + len(items) > most.items or known.size + size_of(items) > most.size:
        told = f"{most.items} items and {most.size} bytes"
        raise InvalidRequest(f"{param}: a conversation holds at most {told}: begin another one", param=param)


def _lost(kept: Stored) -> Stored:
    error = {"code": "server_error", "message": "The server ended before the response was complete"}
    response = {**json.loads(kept.data), "status": "failed", "error": error}
    return replace(kept, about={**kept.about, "status": "failed"}, data=json.dumps(response).encode())


class Reader:
    """Reads what a Store has, in another process."""

    def __init__(self, database: sqlite3.Connection) -> None:
        self._database = database

    def known(self, owner: str, kind: Kind, id: str) -> ItemSummary | None:
        return _known(self._database, owner, kind, id)

    def get(self, owner: str, kind: Kind, id: str) -> Stored | None:
        return _get(self._database, owner, kind, id)

    def items(self, owner: str, id: str) -> list[Any]:
        """All items of an object, the oldest first."""
        rows = self._database.execute(
            "select data from items where owner = ? and parent = ? order by place",
            (owner, _items_key(self._database, owner, id)),
        )
        return [json.loads(row[0]) for row in rows]


@contextmanager
def reading(folder: Path, connect: Connect | None = None) -> Iterator[Reader]:
    """Gives what reads the store of a folder, as it is at this moment, in another process than the one that has the
    Store. `connect`: see Database."""
    path = f"{(folder / FILE).resolve().as_uri()}?mode=ro"
    with closing((connect or sqlite3.connect)(path, uri=True, timeout=PATIENCE, isolation_level=None)) as database:
        database.execute("begin")  # what is deleted a few rows at a time is there whole, or not at all
        yield Reader(database)


def _chunks(items: Sequence[Item]) -> list[Sequence[Item]]:
    """Items as transactions insert them; at least one chunk, which may be empty."""
    chunks, begin, size = list[Sequence[Item]](), 0, 0
    for place, item in enumerate(items):
        size += len(item.data) + ROW
        if place > begin and (size > BATCH_BYTES or place - begin == BATCH_ROWS):
            chunks.append(items[begin:place])
            begin, size = place, len(item.data) + ROW
    return [*chunks, items[begin:]]


def _items_key(database: sqlite3.Connection, owner: str, id: str) -> str:
    """What the items of an object have as their parent. No item has the "" of an object that is not there."""
    query = "select coalesce(items_key, id) from objects where owner = ? and id = ?"
    row = database.execute(query, (owner, id)).fetchone()
    return "" if row is None else str(row[0])


def _insert(database: sqlite3.Connection, owner: str, id: str, items: Sequence[Item], place: int) -> None:
    rows = ((owner, id, place + more, item.id, item.data) for more, item in enumerate(items))
    database.executemany("insert or replace into items values (?, ?, ?, ?, ?)", rows)


def _get(database: sqlite3.Connection, owner: str, kind: Kind, id: str) -> Stored | None:
    query = "select about, data from objects where owner = ? and id = ? and kind = ?"
    row = database.execute(query, (owner, id, kind)).fetchone()
    return None if row is None else Stored(kind, json.loads(row[0]), bytes(row[1]))


def _known(database: sqlite3.Connection, owner: str, kind: Kind, id: str) -> ItemSummary | None:
    query = "select about, length(data), size, count from objects where owner = ? and id = ? and kind = ?"
    row = database.execute(query, (owner, id, kind)).fetchone()
    return None if row is None else ItemSummary(json.loads(row[0]), *row[1:])
