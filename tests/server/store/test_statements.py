"""No statement that runs while the server answers does work that grows with the size of the store."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from quire.server.durability.data_dir import DataDir, open_data_dir
from quire.server.durability.data_dir_rpc import RPC_METHODS
from quire.server.durability.journal import JournaledCall, PinnedReplayFields, ProgressUpdate
from quire.server.durability.progress import CallProgress
from quire.server.store.batches import Batch, BatchLine, LineResult
from quire.server.store.database import DATABASE_FILE, ROW_OVERHEAD_BYTES
from quire.server.store.files import new_file
from quire.server.store.response_store import ConversationLimits, open_store_reader
from quire.server.store.sweeper import SECONDS_PER_DAY
from tests.server.statements import Counted, Watched
from tests.server.store.test_response_store import BIG, conversation, item, response

A = "a"
OLD = time.time() - 1000 * SECONDS_PER_DAY
SIZES = (1_300, 2_600)
"""Rows of each table: more than any statement reads at once."""
ABOUT = {"response": '{"status": "completed", "previous": null}', "conversation": "{}"}
ENDS = {"batch": OLD, "vision": None}
"""When files expire, by purpose."""
PINS = b'{"id":"x","name":"","created":0,"seed":1}'
PROGRESS = msgspec.msgpack.encode(CallProgress())


def batch(id: str, status: Any = "validating") -> Batch:
    return Batch(
        id=id, endpoint="e", input_file_id="f", completion_window="24h", created_at=1, expires_at=9, status=status
    )


def fill(folder: Path, rows: int) -> None:
    """Store `rows` rows of each kind for one owner; most are due to be deleted."""
    open_data_dir(folder, BIG).close()
    connection = sqlite3.connect(folder / DATABASE_FILE, isolation_level=None)
    connection.execute("begin")

    def insert(table: str, columns: int, values: Iterator[tuple[Any, ...]]) -> None:
        connection.executemany(f"insert into {table} values ({', '.join('?' * columns)})", values)

    def objects() -> Iterator[tuple[Any, ...]]:
        for n in range(rows):
            for kind, about in ABOUT.items():
                yield A, f"{kind}{n}", kind, n, 0, ROW_OVERHEAD_BYTES + 2, 0, about, b"{}", OLD + n, f"k{n}"
        for id in ("long", "gone"):
            size = rows * (ROW_OVERHEAD_BYTES + 2) + ROW_OVERHEAD_BYTES + 2
            yield A, id, "conversation", OLD + rows, 0, size, rows, "{}", b"{}", OLD, id

    numbers, data = range(rows), msgspec.json.encode(batch("b", "completed"))
    insert("objects", 11, objects())
    insert("items", 5, ((A, key, n, f"i{n}", b"{}") for n in numbers for key in ("long", "gone", "old")))
    insert("garbage", 5, iter([(1, "items", A, "old", rows * (ROW_OVERHEAD_BYTES + 2)), (2, "lines", "", "ended", 0)]))
    insert("calls", 9, ((A, f"c{n}", "/p", b"", PINS, f"n{n}", OLD + n, ROW_OVERHEAD_BYTES, PROGRESS) for n in numbers))
    insert("bodies", 3, ((A, f"c{n}", b"") for n in numbers))
    insert("files", 7, ((A, f"{use}{n}", n, ends, 1, "", use) for n in numbers for use, ends in ENDS.items()))
    insert("batches", 7, ((A, f"b{n}", n, 9, "completed", data, 1) for n in numbers))
    insert("lines", 8, ((id, n, n, 0, 1, "", n % 2 or None, b"{}") for n in numbers for id in ("ended", "other")))
    connection.execute("commit")
    connection.close()


def scenario(data: DataDir, folder: Path) -> dict[Callable[..., Any], Callable[[], object]]:
    """Each method that other processes may call, in an order in which each has something to do."""
    store, files, batches, calls, processes = data.store, data.files, data.batches, data.calls, data.processes
    file = new_file("x", "batch", 2, keep_seconds=None)
    (folder / "files" / file.id).write_bytes(b"{}")
    call = JournaledCall(path="/p", body=b"{}", pins=PinnedReplayFields(id="new", name="", created=0, seed=1), key="k")
    lines, later = [BatchLine(n, n, 0, 1, "") for n in range(300)], time.time() + 1000
    orders = (True, False)

    def file_page(newest: bool, purpose: str | None) -> object:
        return files.page(A, 20, newest_first=newest, after=None, purpose=purpose)

    def item_page(newest: bool) -> object:
        return store.read_item_page(A, "long", 20, newest_first=newest, after="i900")

    steps: list[tuple[Any, Callable[[], object]]] = [
        (store.get_without_items, lambda: store.get_without_items(A, "response", "response7")),
        (store.get_summary, lambda: store.get_summary(A, "response", "response7")),
        (store.put, lambda: store.put(A, conversation("new", *map(str, range(300))))),
        (store.append_items, lambda: store.append_items(A, "long", [item("more")], ConversationLimits(BIG, BIG))),
        (store.replace_metadata, lambda: store.replace_metadata(A, "long", {"a": "b"})),
        (store.read_item_page, lambda: [item_page(newest) for newest in orders]),
        (store.get_item, lambda: store.get_item(A, "long", "i5")),
        (store.delete_item, lambda: store.delete_item(A, "long", "i5")),
        (store.delete, lambda: store.delete(A, "gone")),
        (
            store.mark_response_failed,
            lambda: [store.put(A, response("u", unfinished=True)), store.mark_response_failed(A, "u")],
        ),
        (files.try_reserve_bytes, lambda: files.try_reserve_bytes(A, file.id, 2, "0")),
        (files.add, lambda: files.add(A, file)),
        (files.release, lambda: files.release(file.id)),
        (files.find, lambda: files.find(A, file.id)),
        (files.page, lambda: [file_page(newest, purpose) for newest in orders for purpose in (None, "vision")]),
        (files.delete, lambda: files.delete(A, file.id)),
        (files.list_expired_files, lambda: files.list_expired_files(None, 100)),
        (batches.add, lambda: [batches.add(A, batch(id), 64) for id in ("x", "y")]),
        (batches.find, lambda: batches.find(A, "x")),
        (batches.list_open_batches, batches.list_open_batches),
        (batches.is_file_in_use, lambda: batches.is_file_in_use(A, "f")),
        (batches.store_lines_and_batch, lambda: batches.store_lines_and_batch(A, batch("x", "in_progress"), lines)),
        (batches.list_unanswered_lines, lambda: batches.list_unanswered_lines("other", 5, 64)),
        (batches.put_result, lambda: batches.put_result("x", LineResult(7, failed=False, line=b"{}"))),
        (batches.list_result_lines, lambda: batches.list_result_lines("other", 3, failed=True)),
        (batches.page, lambda: batches.page(A, 20, "b1200")),
        (batches.cancel, lambda: batches.cancel(A, "y")),
        (batches.mark_finalizing, lambda: batches.mark_finalizing(A, "x")),
        (batches.end, lambda: batches.end(A, batch("x", "completed"), [])),
        (calls.put, lambda: calls.put(A, call, later, "0")),
        (
            calls.update_progress,
            lambda: calls.update_progress([ProgressUpdate(A, "new", CallProgress(), later, is_complete=True)], "0"),
        ),
        (calls.try_claim_call, lambda: calls.try_claim_call(A, "c1", "0", 1)),
        (calls.release_claim, lambda: calls.release_claim(A, "c1", 1)),
        (calls.answering_process, lambda: calls.answering_process(A, "c1")),
        (calls.find, lambda: calls.find(A, "new")),
        (calls.find_by_idempotency_key, lambda: calls.find_by_idempotency_key(A, "k")),
        (calls.delete, lambda: calls.delete(A, "new", include_keyed=False)),
        (processes.exchange_status, lambda: processes.exchange_status("0", {})),
        (processes.list_abandoned_responses, processes.list_abandoned_responses),
        (processes.delete_due_data, lambda: [None for _ in iter(processes.delete_due_data, False)]),
    ]
    return {method.__func__: step for method, step in steps}


def max_instructions_by_statement(folder: Path, rows: int) -> dict[str, int]:
    """By statement: the most SQLite instructions of one execution, in a full store with `rows` rows of each kind."""
    folder.mkdir()
    fill(folder, rows)
    opened = open_data_dir(folder, BIG)
    full = opened.store.stored_bytes - 1000
    opened.close()
    counted = partial(sqlite3.connect, factory=Counted)
    data = open_data_dir(folder, full, retention_seconds=30 * SECONDS_PER_DAY, connect=counted)
    steps = scenario(data, folder)
    assert {*steps} == {*RPC_METHODS.values()}, "a method is not tried here"
    Counted.counts.clear()
    data.calls.quota.make_room(full - 1000)
    for step in steps.values():
        step()
    with open_store_reader(folder, counted) as reader:
        reader.read_summary(A, "conversation", "long")
        reader.read_object_without_items(A, "conversation", "long")
        reader.read_items(A, "new")
    data.close()
    return {text: count for text, count in Counted.counts.items() if not text.startswith("pragma")}


def test_statement_cost_is_independent_of_store_size(tmp_path: Path) -> None:
    small, large = (max_instructions_by_statement(tmp_path / str(rows), rows) for rows in SIZES)
    grown = {text: (small.get(text), count) for text, count in large.items() if count > 1.05 * small.get(text, 0) + 5}
    assert not grown
    assert small.keys() == large.keys()
    assert len(large) > 60, "the statements are counted"


def test_watched_connection_reports_full_table_scan_and_sort(tmp_path: Path) -> None:
    """All tests of the server use such connections."""
    open_data_dir(tmp_path, BIG).close()
    connection = Watched(tmp_path / DATABASE_FILE)
    for wrong in (
        "select id from objects where size > ?",
        "select id from objects where owner = ? order by unfinished, size limit 1",
        "delete from calls where size > ?",
    ):
        connection.execute(wrong, (A,))
        assert wrong in Watched.faults.pop()
        Watched.seen.discard(wrong)
    connection.close()
    assert not Watched.faults
