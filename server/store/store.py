"""What the Responses API keeps: responses and conversations, in SQLite under --data-dir, each its owner's alone.

An object is a row, and so is each of its items: those of a response's input, or of a conversation. Both are kept as the
JSON that answers give: most of these only repeat bytes, and none needs more than its own page.
"""

from __future__ import annotations

import json
import sqlite3
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

from quire.engine.errors import InvalidRequest
from quire.server.encoding import encode_json
from quire.server.store.database import FILE, PATIENCE, ROW, Database

PAGE_BYTES = 4 << 20
"""A page of items ends behind the one that reaches it: 100 large ones would be 400 MB in one answer."""
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
    """Objects by their owner and id. Threads may use it at the same time; each method is one transaction.

    When they take more than `max_bytes` together, the oldest of the owner with most bytes are forgotten; responses that
    have not ended last, for nobody has them yet.
    """

    def __init__(self, database: Database, max_bytes: int) -> None:
        self._database = database
        self._max_bytes = max_bytes
        with database.reading() as connection:
            sizes = connection.execute("select owner, sum(size) from objects group by owner").fetchall()
        self._sizes: Counter[str] = Counter({owner: int(size) for owner, size in sizes})

    @property
    def size(self) -> int:
        """Bytes of all that is kept."""
        return self._sizes.total()

    def get(self, owner: str, kind: Kind, id: str) -> Stored | None:
        with self._database.reading() as database:
            return _get(database, owner, kind, id)

    def known(self, owner: str, kind: Kind, id: str) -> ItemSummary | None:
        with self._database.reading() as database:
            return _known(database, owner, kind, id)

    def put(self, owner: str, new: Put) -> None:
        with self._database.writing(self._sizes) as database:
            self._drop(database, owner, new.id)
            stored = new.stored
            size = ROW + len(stored.data) + size_of(new.items)
            row = (owner, new.id, stored.kind, time.time(), new.unfinished, size, len(new.items))
            database.execute(
                "insert into objects values (?, ?, ?, ?, ?, ?, ?, ?, ?)", (*row, json.dumps(stored.about), stored.data)
            )
            _insert(database, owner, new.id, new.items, 0)
            self._sizes[owner] += size
            self._make_room(database)

    def append(self, owner: str, id: str, items: Sequence[Item], most: Bounds | None = None) -> bool:
        """Add items behind the others of a conversation. Whether there is one. Raises what check_room raises."""
        with self._database.writing(self._sizes) as database:
            known = _known(database, owner, "conversation", id)
            if known is None:
                return False
            if most is not None:
                check_room(known, items, most, "items")
            last = "select max(place) from items where owner = ? and parent = ?"
            place = database.execute(last, (owner, id)).fetchone()[0]
            _insert(database, owner, id, items, 0 if place is None else place + 1)
            self._grow(database, owner, id, size_of(items), len(items))
            self._make_room(database)
            return True

    def describe(self, owner: str, id: str, metadata: Any) -> bytes | None:
        """Replace a conversation's metadata. Returns the conversation as JSON; None where there is none."""
        with self._database.writing(self._sizes) as database:
            stored = _get(database, owner, "conversation", id)
            if stored is None:
                return None
            data = encode_json({**json.loads(stored.data), "metadata": metadata})
            database.execute("update objects set data = ? where owner = ? and id = ?", (data, owner, id))
            self._grow(database, owner, id, len(data) - len(stored.data), 0)
            self._make_room(database)
            return data

    def page(self, owner: str, id: str, limit: int, *, newest_first: bool, after: str | None) -> Page | None:
        """The next items of an object, `limit` at most, behind the one with the id `after`. None where `after` is not
        one of them."""
        sign, order = ("<", "desc") if newest_first else (">", "asc")
        with self._database.reading() as database:
            where, given = "owner = ? and parent = ?", [owner, id]
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
            row = database.execute(query, (owner, id, item_id)).fetchone()
            return None if row is None else bytes(row[0])

    def delete_item(self, owner: str, id: str, item_id: str) -> bool:
        """Whether there was one."""
        with self._database.writing(self._sizes) as database:
            where = "from items where owner = ? and parent = ? and id = ?"
            row = database.execute(f"select length(data) {where}", (owner, id, item_id)).fetchone()
            if row is not None:
                database.execute(f"delete {where}", (owner, id, item_id))
                self._grow(database, owner, id, -row[0] - ROW, -1)
            return row is not None

    def delete(self, owner: str, id: str) -> bool:
        """Whether there was one."""
        with self._database.writing(self._sizes) as database:
            return self._drop(database, owner, id)

    def unfinished(self) -> list[tuple[str, str]]:
        """Owners and ids of the responses that are being worked on, or were when a process ended."""
        with self._database.reading() as database:
            return database.execute("select owner, id from objects where unfinished").fetchall()

    def lose(self, owner: str, id: str) -> None:
        """No process can go on with this response: it has failed. Its items stay."""
        with self._database.writing(self._sizes) as database:
            if (before := _get(database, owner, "response", id)) is None:
                return
            now = _lost(before)
            row = (json.dumps(now.about), now.data, owner, id)
            database.execute("update objects set about = ?, data = ?, unfinished = 0 where owner = ? and id = ?", row)
            self._grow(database, owner, id, len(now.data) - len(before.data), 0)

    def _grow(self, database: sqlite3.Connection, owner: str, id: str, size: int, count: int) -> None:
        grown = "update objects set size = size + ?, count = count + ?, at = ? where owner = ? and id = ?"
        database.execute(grown, (size, count, time.time(), owner, id))
        self._sizes[owner] += size

    def _make_room(self, database: sqlite3.Connection) -> None:
        while self.size > self._max_bytes:
            ((largest, _),) = self._sizes.most_common(1)
            oldest = "select id from objects where owner = ? order by unfinished, at limit 1"
            self._drop(database, largest, database.execute(oldest, (largest,)).fetchone()[0])

    def _drop(self, database: sqlite3.Connection, owner: str, id: str) -> bool:
        where = (owner, id)
        row = database.execute("select size from objects where owner = ? and id = ?", where).fetchone()
        if row is None:
            return False
        database.execute("delete from items where owner = ? and parent = ?", where)
        database.execute("delete from objects where owner = ? and id = ?", where)
        self._sizes[owner] -= row[0]
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
            "select data from items where owner = ? and parent = ? order by place", (owner, id)
        )
        return [json.loads(row[0]) for row in rows]


@contextmanager
def reading(folder: Path) -> Iterator[Reader]:
    """Gives what reads the store of a folder, in another process than the one that has the Store."""
    path = f"{(folder / FILE).resolve().as_uri()}?mode=ro"
    with closing(sqlite3.connect(path, uri=True, timeout=PATIENCE)) as database:
        yield Reader(database)


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
