"""Each object and each item is a row whose JSON is copied into answers unchanged, because most requests only copy bytes
and read one page.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

from quire.engine.common import clock, random_source
from quire.engine.common.errors import InvalidRequest
from quire.server.encoding import encode_json
from quire.server.shared_capacity import BytesByOwner
from quire.server.store.database import BUSY_TIMEOUT_SECONDS, DATABASE_FILE, ROW_OVERHEAD_BYTES, Database, SQLiteConnect
from quire.server.store.garbage import MAX_TRANSACTION_BYTES, MAX_TRANSACTION_OBJECTS, MAX_TRANSACTION_ROWS, Garbage
from quire.server.store.storage_quota import StorageQuota

MAX_PAGE_BYTES = 4 << 20
"""A page ends with the item with which it reaches this size, because 100 large items are 400 MB."""
_DELETED_COLUMNS = "id, coalesce(items_key, id), size, count, length(data), created"
ObjectKind = Literal["response", "conversation"]


class StoredItem(NamedTuple):
    id: str
    data: bytes


class ConversationLimits(NamedTuple):
    max_items: int
    max_bytes: int
    """Stored bytes, including items."""


def total_item_bytes(items: Iterable[StoredItem]) -> int:
    return sum(len(item.data) + ROW_OVERHEAD_BYTES for item in items)


@dataclass(frozen=True, slots=True)
class ObjectWithoutItems:
    kind: ObjectKind
    about: dict[str, Any]
    """Fields that can be read without parsing `data`."""
    data: bytes


@dataclass(frozen=True, slots=True)
class ObjectSummary:
    about: dict[str, Any]
    length: int
    size: int
    """Stored bytes, including items."""
    count: int


@dataclass(frozen=True, slots=True)
class ItemPage:
    items: Sequence[StoredItem]
    more: bool


@dataclass(frozen=True, slots=True)
class ObjectToStore:
    id: str
    stored: ObjectWithoutItems
    items: Sequence[StoredItem] = field(default=())
    unfinished: bool = False


class Store:
    """Thread-safe. Readers see changes atomically, although large objects take several transactions.
    Above `max_bytes`, the largest owner's oldest objects are evicted. Unfinished responses go last, because no client
    has them yet.
    """

    def __init__(self, database: Database, garbage: Garbage, max_bytes: int) -> None:
        self._database = database
        self._garbage = garbage
        with database.read_connection() as connection:
            sizes = connection.execute("select owner, sum(size) from objects group by owner").fetchall()
        self._sizes = BytesByOwner({owner: int(size) for owner, size in sizes})
        self.quota = StorageQuota(database, max_bytes, self._sizes, garbage, lambda: self._evict_objects)

    @property
    def stored_bytes(self) -> int:
        """Includes deleted data that is not purged yet."""
        return self.quota.used_bytes

    def get_without_items(self, owner: str, kind: ObjectKind, id: str) -> ObjectWithoutItems | None:
        with self._database.read_connection() as database:
            return _select_object_without_items(database, owner, kind, id)

    def get_summary(self, owner: str, kind: ObjectKind, id: str) -> ObjectSummary | None:
        with self._database.read_connection() as database:
            return _select_summary(database, owner, kind, id)

    def put(self, owner: str, new: ObjectToStore) -> None:
        stored, items_key = new.stored, random_source.token_hex(8)
        size = ROW_OVERHEAD_BYTES + len(stored.data) + total_item_bytes(new.items)
        self.quota.make_room(size)
        *chunks, last = _split_items_by_transaction(new.items)
        position = 0
        with self._garbage.stage_unpublished_items(owner, items_key) as staging:
            for chunk in chunks:
                with self._database.write_transaction(self._garbage.sizes) as database:
                    staging.record_inserted_bytes(database, total_item_bytes(chunk))
                    _insert_items(database, owner, items_key, chunk, position)
                position += len(chunk)
            with self.write_transaction_with_sizes() as database:
                staging.publish_items(database)
                now = clock.time()
                created = self.delete_returning_created(database, owner, new.id)
                row = (owner, new.id, stored.kind, now, new.unfinished, size, len(new.items))
                database.execute(
                    "insert into objects values (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                    (*row, json.dumps(stored.about), stored.data, now if created is None else created, items_key),
                )
                _insert_items(database, owner, items_key, last, position)
                self._sizes.add_bytes(owner, size)

    def append_items(
        self, owner: str, id: str, items: Sequence[StoredItem], limits: ConversationLimits | None = None
    ) -> bool:
        """Returns False if the conversation is unknown. Raises InvalidRequest above `limits`."""
        if (summary := self.get_summary(owner, "conversation", id)) is None:
            return False
        if limits is not None:
            check_conversation_limits(summary, items, limits, "items")
        self.quota.make_room(total_item_bytes(items))
        with self.write_transaction_with_sizes() as database:
            summary = _select_summary(database, owner, "conversation", id)
            if summary is None:
                return False
            if limits is not None:
                check_conversation_limits(summary, items, limits, "items")
            items_key = _items_key(database, owner, id)
            last = "select max(place) from items where owner = ? and parent = ?"
            last_position = database.execute(last, (owner, items_key)).fetchone()[0]
            _insert_items(database, owner, items_key, items, 0 if last_position is None else last_position + 1)
            self._change_size(database, owner, id, total_item_bytes(items), len(items))
            return True

    def replace_metadata(self, owner: str, id: str, metadata: Any) -> bytes | None:
        with self.write_transaction_with_sizes() as database:
            stored = _select_object_without_items(database, owner, "conversation", id)
            if stored is None:
                return None
            data = encode_json({**json.loads(stored.data), "metadata": metadata})
            database.execute("update objects set data = ? where owner = ? and id = ?", (data, owner, id))
            self._change_size(database, owner, id, len(data) - len(stored.data), 0)
            return data

    def read_item_page(
        self, owner: str, id: str, limit: int, *, newest_first: bool, after: str | None
    ) -> ItemPage | None:
        sign, order = ("<", "desc") if newest_first else (">", "asc")
        with self._database.read_connection() as database:
            where, values = "owner = ? and parent = ?", [owner, _items_key(database, owner, id)]
            if after is not None:
                cursor = database.execute(f"select place from items where {where} and id = ?", (*values, after))
                if (after_row := cursor.fetchone()) is None:
                    return None
                where, values = f"{where} and place {sign} ?", [*values, after_row[0]]
            query = f"select id, data from items where {where} order by place {order} limit ?"
            items: list[StoredItem] = []
            with closing(database.execute(query, (*values, limit + 1))) as rows:
                size = 0
                for row in rows:
                    if len(items) == limit or size >= MAX_PAGE_BYTES:
                        return ItemPage(items, more=True)
                    items.append(StoredItem(*row))
                    size += len(items[-1].data)
            return ItemPage(items, more=False)

    def get_item(self, owner: str, id: str, item_id: str) -> bytes | None:
        with self._database.read_connection() as database:
            query = "select data from items where owner = ? and parent = ? and id = ?"
            row = database.execute(query, (owner, _items_key(database, owner, id), item_id)).fetchone()
            return None if row is None else bytes(row[0])

    def delete_item(self, owner: str, id: str, item_id: str) -> bool:
        with self.write_transaction_with_sizes() as database:
            where = "from items where owner = ? and parent = ? and id = ?"
            key = (owner, _items_key(database, owner, id), item_id)
            row = database.execute(f"select length(data) {where}", key).fetchone()
            if row is not None:
                database.execute(f"delete {where}", key)
                self._change_size(database, owner, id, -row[0] - ROW_OVERHEAD_BYTES, -1)
            return row is not None

    def delete(self, owner: str, id: str) -> bool:
        with self.write_transaction_with_sizes() as database:
            return self.delete_returning_created(database, owner, id) is not None

    def unfinished_responses(self) -> list[tuple[str, str]]:
        with self._database.read_connection() as database:
            return database.execute("select owner, id from objects where unfinished = 1").fetchall()

    def mark_response_failed(self, owner: str, id: str) -> None:
        """The response's items stay."""
        with self.write_transaction_with_sizes() as database:
            if (before := _select_object_without_items(database, owner, "response", id)) is None:
                return
            now = _with_failed_status(before)
            row = (json.dumps(now.about), now.data, owner, id)
            database.execute("update objects set about = ?, data = ?, unfinished = 0 where owner = ? and id = ?", row)
            self._change_size(database, owner, id, len(now.data) - len(before.data), 0)

    def _change_size(self, database: sqlite3.Connection, owner: str, id: str, size: int, count: int) -> None:
        grown = "update objects set size = size + ?, count = count + ?, at = ? where owner = ? and id = ?"
        database.execute(grown, (size, count, clock.time(), owner, id))
        self._sizes.add_bytes(owner, size)

    def write_transaction_with_sizes(self) -> AbstractContextManager[sqlite3.Connection]:
        return self._database.write_transaction(self._sizes, self._garbage.sizes)

    def delete_returning_created(self, database: sqlite3.Connection, owner: str, id: str) -> float | None:
        """Call this in a transaction."""
        query = f"select {_DELETED_COLUMNS} from objects where owner = ? and id = ?"
        row = database.execute(query, (owner, id)).fetchone()
        if row is None:
            return None
        self._delete_object(database, owner, *row)
        return float(row[-1])

    def _delete_object(
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
        items_size = size - ROW_OVERHEAD_BYTES - length
        if count > MAX_TRANSACTION_ROWS or items_size > MAX_TRANSACTION_BYTES:
            self._garbage.add_entry(database, "items", owner, items_key, max(items_size, 0))
        elif count:
            database.execute("delete from items where owner = ? and parent = ?", (owner, items_key))
        database.execute("delete from objects where owner = ? and id = ?", (owner, id))
        self._sizes.add_bytes(owner, -size)

    def _evict_objects(self, database: sqlite3.Connection, target: int) -> bool:
        owner = self._sizes.largest_owner()
        freed = 0
        rows = 0
        query = f"select {_DELETED_COLUMNS} from objects where owner = ? order by unfinished, at limit ?"
        for row in database.execute(query, (owner, MAX_TRANSACTION_OBJECTS)).fetchall():
            self._delete_object(database, owner, *row)
            _, _, size, count, *_ = row
            freed += size
            rows += count
            if (
                freed >= min(target, MAX_TRANSACTION_BYTES)
                or rows >= MAX_TRANSACTION_ROWS
                or self._sizes.largest_owner() != owner
            ):
                break
        return True


def check_conversation_limits(
    summary: ObjectSummary, items: Sequence[StoredItem], limits: ConversationLimits, param: str
) -> None:
    """Raises InvalidRequest. A response adds its own items without this check, so conversations may exceed their
    limits.
    """
    if summary.count + len(items) > limits.max_items or summary.size + total_item_bytes(items) > limits.max_bytes:
        limit_text = f"{limits.max_items} items and {limits.max_bytes} bytes"
        raise InvalidRequest(f"{param}: a conversation holds at most {limit_text}: begin another one", param=param)


def _with_failed_status(stored: ObjectWithoutItems) -> ObjectWithoutItems:
    error = {"code": "server_error", "message": "The server ended before the response was complete"}
    response = {**json.loads(stored.data), "status": "failed", "error": error}
    return replace(stored, about={**stored.about, "status": "failed"}, data=json.dumps(response).encode())


class StoreReader:
    def __init__(self, database: sqlite3.Connection) -> None:
        self._database = database

    def read_summary(self, owner: str, kind: ObjectKind, id: str) -> ObjectSummary | None:
        return _select_summary(self._database, owner, kind, id)

    def read_object_without_items(self, owner: str, kind: ObjectKind, id: str) -> ObjectWithoutItems | None:
        return _select_object_without_items(self._database, owner, kind, id)

    def read_items(self, owner: str, id: str) -> list[Any]:
        rows = self._database.execute(
            "select data from items where owner = ? and parent = ? order by place",
            (owner, _items_key(self._database, owner, id)),
        )
        return [json.loads(row[0]) for row in rows]


@contextmanager
def open_store_reader(folder: Path, connect: SQLiteConnect | None = None) -> Iterator[StoreReader]:
    """Opens a read-only snapshot, for processes that do not own the data."""
    path = f"{(folder / DATABASE_FILE).resolve().as_uri()}?mode=ro"
    with closing(
        (connect or sqlite3.connect)(path, uri=True, timeout=BUSY_TIMEOUT_SECONDS, isolation_level=None)
    ) as database:
        database.execute("begin")  # objects that are being purged appear whole or not at all
        yield StoreReader(database)


def _split_items_by_transaction(items: Sequence[StoredItem]) -> list[Sequence[StoredItem]]:
    chunks: list[Sequence[StoredItem]] = []
    begin = 0
    size = 0
    for index, item in enumerate(items):
        size += len(item.data) + ROW_OVERHEAD_BYTES
        if index > begin and (size > MAX_TRANSACTION_BYTES or index - begin == MAX_TRANSACTION_ROWS):
            chunks.append(items[begin:index])
            begin, size = index, len(item.data) + ROW_OVERHEAD_BYTES
    return [*chunks, items[begin:]]


def _items_key(database: sqlite3.Connection, owner: str, id: str) -> str:
    """If the object is unknown, returns "", which is no item's key."""
    query = "select coalesce(items_key, id) from objects where owner = ? and id = ?"
    row = database.execute(query, (owner, id)).fetchone()
    return "" if row is None else str(row[0])


def _insert_items(
    database: sqlite3.Connection, owner: str, id: str, items: Sequence[StoredItem], first_position: int
) -> None:
    rows = ((owner, id, first_position + offset, item.id, item.data) for offset, item in enumerate(items))
    database.executemany("insert or replace into items values (?, ?, ?, ?, ?)", rows)


def _select_object_without_items(
    database: sqlite3.Connection, owner: str, kind: ObjectKind, id: str
) -> ObjectWithoutItems | None:
    query = "select about, data from objects where owner = ? and id = ? and kind = ?"
    row = database.execute(query, (owner, id, kind)).fetchone()
    return None if row is None else ObjectWithoutItems(kind, json.loads(row[0]), bytes(row[1]))


def _select_summary(database: sqlite3.Connection, owner: str, kind: ObjectKind, id: str) -> ObjectSummary | None:
    query = "select about, length(data), size, count from objects where owner = ? and id = ? and kind = ?"
    row = database.execute(query, (owner, id, kind)).fetchone()
    return None if row is None else ObjectSummary(json.loads(row[0]), *row[1:])
