"""A full store or journal must not delay other requests (issue 56, item 2). At --max-stored-size, a `POST
/v1/conversations` of 3.9 MB stopped every key's first tokens for 40 s, and so did a full journal: each eviction sorted
all rows of the largest owner in one transaction under one lock.

The tests count SQLite instructions: no transaction takes more than one of a batch of rows, whatever it puts, evicts or
deletes.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from quire.server.durability.data_dir import DataDir, open_data_dir
from quire.server.store.database import ROW_OVERHEAD_BYTES
from quire.server.store.garbage import MAX_TRANSACTION_ROWS
from tests.server.durability.test_journal import LATER, call
from tests.server.store.test_response_store import BIG, conversation, opened, response

ROOM = 6_000
"""Rows in the full store."""
MOST = 250 * MAX_TRANSACTION_ROWS
"""Instructions of a transaction. Putting a row takes about 30, deleting it as many, and its index entries the same."""


class Transactions(sqlite3.Connection):
    """Counts the instructions of each transaction."""

    most = 0

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._count = 0
        self.set_progress_handler(self._add, 1)

    def execute(self, statement: str, *values: Any) -> sqlite3.Cursor:
        if statement == "begin immediate":
            self._count = 0
        return super().execute(statement, *values)

    def _add(self) -> int:
        self._count += 1
        Transactions.most = max(Transactions.most, self._count)
        return 0


@pytest.fixture
def full_data_dir(tmp_path: Path) -> Iterator[DataDir]:
    """A store full of one key's empty conversations, and a journal full of its calls."""
    data = open_data_dir(tmp_path, BIG)
    for number in range(ROOM):
        data.store.put("attacker", conversation(str(number)))
    for number in range(ROOM):
        data.calls.put("attacker", call(str(number)), LATER + number, "0")
        data.calls.remove_answering_process("attacker", str(number), "0")
    size = data.store.stored_bytes
    data.close()
    data = open_data_dir(tmp_path, size, connect=partial(sqlite3.connect, factory=Transactions))
    Transactions.most = 0
    yield data
    data.close()


@pytest.mark.slow
def test_store_transactions_stay_below_batch_of_rows_when_full(full_data_dir: DataDir) -> None:
    size = full_data_dir.store.stored_bytes
    full_data_dir.store.put("attacker", conversation("many", *map(str, range(5_000))))
    assert full_data_dir.store.stored_bytes <= size
    full_data_dir.store.put("attacker", conversation("large", data=b"x" * 1_000_000))
    full_data_dir.store.delete("attacker", "many")
    for number in range(300):
        full_data_dir.calls.put("attacker", call(f"new {number}", body=b"x" * 2_000), LATER, "0")
    while full_data_dir.processes.delete_due_data():
        pass
    assert 0 < Transactions.most < MOST
    assert full_data_dir.store.get_summary("attacker", "conversation", "0") is None, "the oldest made room"
    assert full_data_dir.store.get_summary("attacker", "conversation", "large") is not None
    assert full_data_dir.store.stored_bytes <= 0.95 * size, "room is made ahead of need"


def test_deleted_object_is_invisible_before_its_rows_are_deleted(tmp_path: Path) -> None:
    data = open_data_dir(tmp_path, BIG)
    many = [str(number) for number in range(4 * MAX_TRANSACTION_ROWS)]
    data.store.put("a", conversation("long", *many))
    size = data.store.stored_bytes
    assert data.store.delete("a", "long")
    assert data.store.stored_bytes > size - 2 * ROW_OVERHEAD_BYTES, "its rows are still there"
    assert data.store.get_summary("a", "conversation", "long") is None
    assert data.store.get_item("a", "long", "1") is None
    page = data.store.read_item_page("a", "long", 9, newest_first=False, after=None)
    assert page is not None
    assert not page.items
    data.store.put("a", conversation("long", "1", "2"))
    page = data.store.read_item_page("a", "long", 9, newest_first=False, after=None)
    assert page is not None
    assert [each.id for each in page.items] == ["1", "2"], "another one of this id has its own items"
    data.close()
    data = open_data_dir(tmp_path, BIG)  # the server restarts
    assert data.store.stored_bytes > size - 2 * ROW_OVERHEAD_BYTES
    while data.processes.delete_due_data():
        pass
    page = data.store.read_item_page("a", "long", 9, newest_first=False, after=None)
    assert page is not None
    assert [each.id for each in page.items] == ["1", "2"]
    assert data.store.stored_bytes < 10 * ROW_OVERHEAD_BYTES
    data.close()


def test_put_of_many_rows_is_atomic_when_disk_is_full(tmp_path: Path) -> None:
    """The disk fills up, or the process ends, in the middle of the put."""

    class Full(sqlite3.Connection):
        room = BIG

        def executemany(self, statement: str, *values: Any) -> sqlite3.Cursor:
            if "items" in statement:
                Full.room -= 1
                if Full.room < 0:
                    raise sqlite3.OperationalError("database or disk is full")
            return super().executemany(statement, *values)

    data = open_data_dir(tmp_path, BIG, connect=partial(sqlite3.connect, factory=Full))
    data.store.put("a", response("r", "i"))
    before = data.store.stored_bytes
    Full.room = 2
    with pytest.raises(sqlite3.OperationalError):
        data.store.put("a", response("r", *map(str, range(4 * MAX_TRANSACTION_ROWS))))
    assert data.store.stored_bytes > before, "what was put of it counts until it is deleted"
    Full.room = BIG
    page = data.store.read_item_page("a", "r", 9, newest_first=False, after=None)
    assert page is not None
    assert [each.id for each in page.items] == ["i"]
    data.close()
    data = open_data_dir(tmp_path, BIG)
    while data.processes.delete_due_data():
        pass
    assert data.store.stored_bytes == before
    data.close()


def test_eviction_takes_from_largest_key_first(tmp_path: Path) -> None:
    most = 45 * ROW_OVERHEAD_BYTES
    database, store = opened(tmp_path, most)
    for number in range(20):
        store.put("large", conversation(f"l{number}"))
        store.put("small", conversation(f"s{number}") if number < 5 else conversation("s0"))
    store.put("third", conversation("new", *map(str, range(20))))
    remaining = [number for number in range(5) if store.get_summary("small", "conversation", f"s{number}") is not None]
    assert remaining == [0, 1, 2, 3, 4], "a key with less loses nothing"
    assert store.get_summary("large", "conversation", "l0") is None
    assert store.get_summary("large", "conversation", "l19") is not None
    assert store.stored_bytes <= most
    database.close()
