"""Stored objects persist, are private to their owner and bounded in size; earlier database versions are migrated."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from quire.engine.common.errors import ConfigError, InvalidRequest
from quire.server.durability.data_dir import open_data_dir
from quire.server.store import response_store as store_module
from quire.server.store.database import DATABASE_FILE, ROW_OVERHEAD_BYTES, Database
from quire.server.store.garbage import Garbage
from quire.server.store.response_store import (
    ConversationLimits,
    ObjectToStore,
    ObjectWithoutItems,
    Store,
    StoredItem,
    open_store_reader,
    total_item_bytes,
)
from quire.server.store.schema import SCHEMA_VERSION

BIG = 1 << 30


def conversation(id: str, *items: str, data: bytes = b"{}") -> ObjectToStore:
    return ObjectToStore(id, ObjectWithoutItems("conversation", {}, data), [item(each) for each in items])


def response(id: str, *items: str, unfinished: bool = False, data: bytes = b"{}") -> ObjectToStore:
    about = {"status": "completed", "previous": None}
    return ObjectToStore(
        id, ObjectWithoutItems("response", about, data), [item(each) for each in items], unfinished=unfinished
    )


def item(id: str, text: str = "") -> StoredItem:
    return StoredItem(id, json.dumps({"id": id, "text": text}).encode())


def opened(folder: Path, most: int) -> tuple[Database, Store]:
    database = Database(folder)
    return database, Store(database, Garbage(database), most)


def ids(store: Store, owner: str, id: str, limit: int = 100, after: str | None = None, *, newest: bool = False) -> Any:
    page = store.read_item_page(owner, id, limit, newest_first=newest, after=after)
    return None if page is None else ([each.id for each in page.items], page.more)


def test_stored_objects_survive_reopening_and_are_private_to_owner(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "folder"
    database, store = opened(folder, BIG)
    store.put("a", response("1", "x", "y", data=b'{"id": "1"}'))
    store.put("b", conversation("1", "z"))
    for owner, kind in (("a", "conversation"), ("b", "response"), ("c", "response")):
        assert store.get_without_items(owner, kind, "1") is None  # type: ignore[arg-type]
    assert (folder / DATABASE_FILE).stat().st_mode & 0o077 == 0, "others may not read it"
    with open_store_reader(folder) as reader:
        summary = reader.read_summary("a", "response", "1")
        assert summary is not None
        assert (summary.about["status"], summary.length, summary.count) == ("completed", len(b'{"id": "1"}'), 2)
        assert [each["id"] for each in reader.read_items("a", "1")] == ["x", "y"]
        assert reader.read_object_without_items("b", "response", "1") is None
    database.close()
    database, reopened = opened(folder, BIG)
    assert reopened.delete("b", "1")
    assert not reopened.delete("b", "1")
    stored = reopened.get_without_items("a", "response", "1")
    assert stored is not None
    assert stored.data == b'{"id": "1"}'
    assert ids(reopened, "a", "1") == (["x", "y"], False)
    assert ids(reopened, "b", "1") == ([], False)
    database.close()


def test_data_dir_in_use_or_unreadable_raises_config_error(tmp_path: Path) -> None:
    database, _ = opened(tmp_path, BIG)
    with pytest.raises(ConfigError, match="another server"):
        opened(tmp_path, BIG)[1]
    database.close()
    opened(tmp_path, BIG)[0].close()
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="data_dir"):
        opened(tmp_path / "file", BIG)[1]
    (tmp_path / DATABASE_FILE).write_bytes(b"no database" * 100)
    with pytest.raises(ConfigError, match="data_dir"):
        opened(tmp_path, BIG)[1]


def test_write_fails_while_database_file_is_missing(tmp_path: Path) -> None:
    """SQLite would go on writing into a file that no path names any more."""
    folder = tmp_path / "da ta ü"
    database, store = opened(folder, BIG)
    store.put("a", response("1"))
    (folder / DATABASE_FILE).rename(tmp_path / "away")
    with pytest.raises(sqlite3.OperationalError, match="was removed"):
        store.put("a", response("2"))
    (tmp_path / "away").rename(folder / DATABASE_FILE)
    store.put("a", response("2"))
    database.close()


def test_damaged_database_raises_config_error(tmp_path: Path) -> None:
    data = open_data_dir(tmp_path, BIG)
    for number in range(100):
        data.store.put("a", response(str(number), "i" * 100))
    data.close()
    content = bytearray((tmp_path / DATABASE_FILE).read_bytes())
    content[4096:] = b"x" * len(content[4096:])
    (tmp_path / DATABASE_FILE).write_bytes(content)
    with pytest.raises(ConfigError, match="data_dir: cannot"):
        open_data_dir(tmp_path, BIG)


def test_item_pages_are_ordered_and_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    database, store = opened(tmp_path, BIG)
    store.put("a", conversation("1", *"abc"))
    assert store.append_items("a", "1", [item(each) for each in "de"])
    assert not store.append_items("a", "2", [item("x")])
    assert ids(store, "a", "1", 2) == (["a", "b"], True)
    assert ids(store, "a", "1", 3, "b") == (["c", "d", "e"], False)
    assert ids(store, "a", "1", 2, "d", newest=True) == (["c", "b"], True)
    assert ids(store, "a", "1", 2, "x") is None
    assert store.get_item("a", "1", "c") == item("c").data
    assert store.delete_item("a", "1", "e")
    assert not store.delete_item("a", "1", "e")
    store.append_items("a", "1", [item("f")])
    assert ids(store, "a", "1", newest=True) == (["f", "d", "c", "b", "a"], False)
    summary = store.get_summary("a", "conversation", "1")
    assert summary is not None
    assert (summary.count, summary.size) == (5, store.stored_bytes)
    monkeypatch.setattr(store_module, "MAX_PAGE_BYTES", len(item("a").data) + 1)
    assert ids(store, "a", "1") == (["a", "b"], True), "a page is bounded in bytes, too"
    database.close()


def test_rejected_write_leaves_store_unchanged(tmp_path: Path) -> None:
    database, store = opened(tmp_path, BIG)
    store.put("a", conversation("1", "a"))
    size = store.stored_bytes

    more = total_item_bytes([item("b")])
    for most in (ConversationLimits(1, size + more), ConversationLimits(2, size + more - 1)):
        with pytest.raises(InvalidRequest, match="items: a conversation holds at most"):
            store.append_items("a", "1", [item("b")], most)
    with pytest.raises(TypeError):
        store.replace_metadata("a", "1", object())
    assert (ids(store, "a", "1"), store.stored_bytes) == ((["a"], False), size)
    metadata = b'{"metadata":{"n":"1"}}'
    assert store.replace_metadata("a", "1", {"n": "1"}) == metadata
    assert store.replace_metadata("a", "2", {}) is None
    assert store.stored_bytes == size + len(metadata) - len(b"{}")
    assert store.append_items("a", "1", [item("b")], ConversationLimits(2, store.stored_bytes + more))
    database.close()


def test_store_quota_evicts_oldest_objects_of_largest_owner(tmp_path: Path) -> None:
    most = 20 * ROW_OVERHEAD_BYTES
    database, store = opened(tmp_path, most)
    store.put("small", response("first", "i"))
    for number in range(20):
        store.put("large", response(str(number), "i"))
        assert store.stored_bytes <= most
    assert store.get_summary("small", "response", "first") is not None, "another's flood takes nothing away"
    assert store.get_summary("large", "response", "0") is None
    assert ids(store, "large", "0") == ([], False), "its items went with it"
    remaining = [number for number in range(20) if store.get_summary("large", "response", str(number))]
    assert remaining == list(range(remaining[0], 20))
    store.put("large", response("19"))
    size = store.stored_bytes
    database.close()
    database, reopened = opened(tmp_path, most)
    assert reopened.stored_bytes == size
    database.close()


def test_store_quota_evicts_unfinished_response_last(tmp_path: Path) -> None:
    database, store = opened(tmp_path, 20 * ROW_OVERHEAD_BYTES)
    store.put("a", response("going", "i", unfinished=True))
    for number in range(20):
        store.put("a", response(str(number), "i"))
    assert store.unfinished_responses() == [("a", "going")]
    store.put("a", response("going", "i"))
    assert store.get_summary("a", "response", "going") is not None
    database.close()


def test_unfinished_response_can_be_marked_failed_after_reopening(tmp_path: Path) -> None:
    database, store = opened(tmp_path, BIG)
    store.put("a", response("1", "x", unfinished=True))
    store.put("a", response("2"))
    database.close()
    database, reopened = opened(tmp_path, BIG)
    assert reopened.unfinished_responses() == [("a", "1")]
    reopened.mark_response_failed("a", "1")
    assert reopened.unfinished_responses() == []
    reopened.mark_response_failed("a", "3")
    first, second = (reopened.get_without_items("a", "response", id) for id in "12")
    assert first is not None
    assert second is not None
    assert (json.loads(first.data)["status"], second.data) == ("failed", b"{}")
    assert ids(reopened, "a", "1") == (["x"], False)
    size = reopened.stored_bytes
    database.close()
    assert opened(tmp_path, BIG)[1].stored_bytes == size


KEPT = """
create table kept (
    owner text not null, id text not null, at real not null, unfinished integer not null, size integer not null,
    data text not null, primary key (owner, id));
create index by_age on kept (owner, at);
"""
"""The schema of version 0."""


def test_version_0_database_is_migrated(tmp_path: Path) -> None:
    answer = {"id": "resp_1", "status": "in_progress", "background": True, "output": []}
    old = {
        "response": answer,
        "input": [{"id": "m", "text": "\ud800"}],
        "previous": "resp_0",
        "events": 3,
        "streamed": False,
    }
    talk = {"id": "conv_1", "created_at": 5, "metadata": {"a": "b"}, "items": [{"id": "m1"}, {"id": "m2"}]}
    with closing(sqlite3.connect(tmp_path / DATABASE_FILE)) as database:
        database.executescript(KEPT)
        for at, (id, data) in enumerate({"resp_1": old, "conv_1": talk}.items()):
            text = json.dumps(data)
            database.execute("insert into kept values ('a', ?, ?, ?, ?, ?)", (id, at, at == 0, len(text), text))
        database.commit()
    database, store = opened(tmp_path, BIG)
    migrated_response = store.get_without_items("a", "response", "resp_1")
    assert migrated_response is not None
    assert json.loads(migrated_response.data) == answer
    about = {"previous": "resp_0", "events": 3, "streamed": False, "status": "in_progress", "background": True}
    assert migrated_response.about == about
    migrated_conversation = store.get_without_items("a", "conversation", "conv_1")
    assert migrated_conversation is not None
    assert json.loads(migrated_conversation.data) == {
        "id": "conv_1",
        "created_at": 5,
        "metadata": {"a": "b"},
        "object": "conversation",
    }
    assert ids(store, "a", "conv_1") == (["m1", "m2"], False)
    assert store.unfinished_responses() == [("a", "resp_1")]
    store.mark_response_failed("a", "resp_1")
    migrated_response = store.get_without_items("a", "response", "resp_1")
    assert migrated_response is not None
    assert json.loads(migrated_response.data)["status"] == migrated_response.about["status"] == "failed"
    size = store.stored_bytes
    database.close()
    database, reopened = opened(tmp_path, BIG)
    assert reopened.stored_bytes == size
    database.close()


def test_database_of_later_version_raises_config_error(tmp_path: Path) -> None:
    opened(tmp_path, BIG)[0].close()
    with closing(sqlite3.connect(tmp_path / DATABASE_FILE)) as database:
        database.execute(f"pragma user_version = {SCHEMA_VERSION + 1}")
    with pytest.raises(ConfigError, match="later version"):
        opened(tmp_path, BIG)[1]
