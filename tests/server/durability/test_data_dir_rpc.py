"""The remote data directory does what the local one does, and serves only the declared methods."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from collections.abc import Iterator
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any

import msgspec
import pytest

from quire.engine.common.errors import InvalidRequest
from quire.engine.processes.answering import Answering
from quire.server.batches.output_files import finish_batch
from quire.server.durability.data_dir import DataDir, open_data_dir
from quire.server.durability.data_dir_rpc import RPC_METHODS, remote_data_dir, serve_data_dir_call
from quire.server.durability.journal import JournaledCall, PinnedReplayFields, ProgressUpdate
from quire.server.durability.peers import make_blocking_data_dir_call
from quire.server.durability.progress import CallProgress, ChoiceFinish
from quire.server.store.batches import Batch, BatchError, Batches, BatchLine, LineResult
from quire.server.store.files import new_file
from quire.server.store.response_store import ConversationLimits, ObjectToStore, ObjectWithoutItems, StoredItem

A = "a"
RESULT = b'{"response":{"body":{}}}'


@pytest.fixture
def both(tmp_path: Path) -> Iterator[tuple[DataDir, DataDir]]:
    """The data directory, and a remote one that calls it."""
    data = open_data_dir(tmp_path, 1 << 20)
    yield data, remote_data_dir(tmp_path, partial(serve_data_dir_call, data))
    data.close()


def test_every_rpc_method_validates_argument_types(both: tuple[DataDir, DataDir]) -> None:
    for name in RPC_METHODS:
        wrong = msgspec.msgpack.encode([name, [{}] * 9])
        assert b"Validation" in serve_data_dir_call(both[0], wrong), f"{name} takes anything"


def test_remote_store_reads_what_local_store_holds(both: tuple[DataDir, DataDir]) -> None:
    local_store, remote_store = both[0].store, both[1].store
    items = [StoredItem("i1", b"{}"), StoredItem("i2", b'{"a":1}')]
    remote_store.put(A, ObjectToStore("c", ObjectWithoutItems("conversation", {"n": [1, None, 0.5]}, b"{}"), items))
    assert remote_store.get_without_items(A, "conversation", "c") == local_store.get_without_items(
        A, "conversation", "c"
    )
    assert remote_store.get_summary(A, "conversation", "c") == local_store.get_summary(A, "conversation", "c")
    assert remote_store.read_item_page(A, "c", 1, newest_first=True, after=None) == local_store.read_item_page(
        A, "c", 1, newest_first=True, after=None
    )
    assert remote_store.get_without_items(A, "response", "c") is None
    with pytest.raises(InvalidRequest, match="at most 2 items") as caught:
        remote_store.append_items(A, "c", items, ConversationLimits(2, 1000))
    assert caught.value.param == "items"
    assert remote_store.append_items(A, "c", [StoredItem("i3", b"{}")])
    assert remote_store.replace_metadata(A, "c", {"k": "v"}) == b'{"metadata":{"k":"v"}}'


def test_remote_files_and_batches_equal_local_ones(both: tuple[DataDir, DataDir]) -> None:
    data, remote = both
    file = new_file("in.jsonl", "batch", 2, keep_seconds=None)
    remote.contents.write_content(file.id, BytesIO(b"{}"))
    remote.files.add(A, file)
    assert remote.files.find(A, file.id) == file
    batch = Batch(
        id="b", endpoint="/v1/completions", input_file_id=file.id, completion_window="24h", created_at=1, expires_at=9
    )
    assert remote.batches.add(A, batch, 1)
    assert remote.batches.list_open_batches() == [(A, batch)] == data.batches.list_open_batches()
    now = msgspec.structs.replace(batch, status="in_progress", errors=(BatchError("c", "m", 1),))
    remote.batches.store_lines_and_batch(A, now, [BatchLine(0, 1, 0, 2, "x"), BatchLine(1, 2, 2, 2, "y")])
    assert remote.batches.list_unanswered_lines("b", -1, 9) == data.batches.list_unanswered_lines("b", -1, 9)
    remote.batches.put_result("b", LineResult(0, failed=False, line=b"\x00{}"))
    assert remote.batches.list_result_lines("b", 0, failed=False) == [(1, b"\x00{}")]
    page = remote.batches.page(A, 5, None)
    assert page is not None
    assert (list(page[0]), page[1]) == ([data.batches.find(A, "b")], False)
    cancelled = remote.batches.cancel(A, "b")
    assert cancelled is not None
    assert cancelled.status == "cancelling"
    remote.batches.end(A, msgspec.structs.replace(cancelled, status="cancelled"), [])
    with pytest.raises(InvalidRequest, match="is cancelled already"):
        remote.batches.cancel(A, "b")
    assert remote.files.delete(A, file.id)


class _ReplaceableOwner:
    """A data directory whose owning process is replaced by another while remote callers go on."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.data = open_data_dir(folder, 1 << 20)
        self.asked = remote_data_dir(folder, self._answer)
        self.before = b"nothing"
        """Method before whose first call the owner is replaced, once."""

    def _answer(self, asked: bytes) -> bytes:
        if self.before in asked:
            self.before = b"nothing"
            self.replace()
        return serve_data_dir_call(self.data, asked)

    def replace(self) -> None:
        self.data.close()
        self.data = open_data_dir(self._folder, 1 << 20, {"0.1"})


def test_add_file_fails_if_new_data_dir_owner_deleted_content(tmp_path: Path) -> None:
    """A new owner deletes files that it does not know, such as one that a live process has just written."""
    shared = _ReplaceableOwner(tmp_path)
    files, contents = shared.asked.files, shared.asked.contents
    file = new_file("in.jsonl", "batch", 2, keep_seconds=None)
    contents.write_content(file.id, BytesIO(b"{}"))
    shared.replace()
    with pytest.raises(FileNotFoundError, match="was replaced before it knew of the file"):
        files.add(A, file)
    assert files.find(A, file.id) is None
    assert shared.data.files.stored_bytes == 0
    contents.write_content(file.id, BytesIO(b"{}"))
    files.add(A, file)
    shared.replace()
    assert contents.content_path(file.id).read_bytes() == b"{}"
    shared.data.close()


def _add_batch_with_result(batches: Batches) -> Batch:
    """Add a batch of one line that has its result."""
    batch = Batch(id="b", endpoint="e", input_file_id="f", completion_window="24h", created_at=1, expires_at=9)
    assert batches.add(A, batch, 1)
    now = msgspec.structs.replace(batch, status="in_progress", total=1)
    batches.store_lines_and_batch(A, now, [BatchLine(0, 1, 0, 2, "x")])
    batches.put_result("b", LineResult(0, failed=False, line=RESULT))
    return now


def _check_results(data: DataDir) -> None:
    ended = data.batches.find(A, "b")
    assert ended is not None
    assert ended.status == "completed"
    assert ended.output_file_id is not None
    assert data.contents.content_path(ended.output_file_id).read_bytes() == RESULT + b"\n"


def test_finish_batch_succeeds_after_data_dir_owner_is_replaced(tmp_path: Path) -> None:
    shared = _ReplaceableOwner(tmp_path)
    batches, contents = shared.asked.batches, shared.asked.contents
    now = _add_batch_with_result(batches)
    shared.before = b"Batches.end"
    with pytest.raises(FileNotFoundError):
        finish_batch(batches, contents, A, now)
    assert shared.data.batches.list_open_batches() == [(A, now)], "it is ended later, as when the disk was full"
    finish_batch(batches, contents, A, now)
    _check_results(shared.data)
    shared.data.close()


class _StalledLink:
    """A link whose response to Batches.end does not arrive before this process ends."""

    def __init__(self, data: DataDir) -> None:
        self._data = data
        self.answering = Answering()
        self.identity = "0.1"
        self.done = asyncio.Event()

    async def ask(self, topic: str, body: bytes = b"", *, to: str | None = None) -> list[bytes]:
        response = serve_data_dir_call(self._data, body)
        if b"Batches.end" in body:
            self.done.set()
            await asyncio.sleep(3600)
        return [response]


def test_batch_results_survive_process_stop_during_finish(tmp_path: Path) -> None:
    data = open_data_dir(tmp_path, 1 << 20)
    now = _add_batch_with_result(data.batches)

    async def live() -> None:
        link = _StalledLink(data)
        remote = remote_data_dir(tmp_path, make_blocking_data_dir_call(link))
        asyncio.get_running_loop().run_in_executor(None, finish_batch, remote.batches, remote.contents, A, now)
        await link.done.wait()

    process = threading.Thread(target=asyncio.run, args=(live(),))
    process.start()
    process.join()
    _check_results(data)
    data.close()


def test_remote_journal_equals_local_journal(both: tuple[DataDir, DataDir]) -> None:
    data, remote = both
    pins = PinnedReplayFields(id="s", name="", created=1, seed=2**63 - 1, before=("f",))
    progress = CallProgress([[1, 2]], [0], [ChoiceFinish("stop", "x", came_with_token=True)])
    assert remote.calls.put(
        A, JournaledCall(path="/v1/completions", body=b"\xff", pins=pins, progress=progress), 4e9, "0.0"
    )
    assert remote.calls.find(A, "s") == data.calls.find(A, "s")
    assert remote.calls.answering_process(A, "s") == "0.0"
    more = CallProgress([[1, 2, 3]], [0], [None])
    remote.calls.update_progress([ProgressUpdate(A, "s", more, 4e9, is_complete=False)], "0.0")
    journaled = remote.calls.find(A, "s")
    assert journaled is not None
    assert journaled.progress == more
    assert remote.processes.exchange_status("0.0", {"open": 2}) == data.processes.exchange_status("0.0", {"open": 2})


def test_journaled_call_is_claimed_by_one_attempt_at_a_time(both: tuple[DataDir, DataDir]) -> None:
    data, remote = both
    call = JournaledCall(
        path="/v1/completions", body=b"{}", pins=PinnedReplayFields(id="s", name="", created=1, seed=1)
    )
    assert remote.calls.try_claim_call(A, "s", "0.0", 1)
    assert not remote.calls.try_claim_call(A, "s", "1.0", 2), "another process"
    assert not data.calls.try_claim_call(A, "s", "0.0", 3), "the same one"
    remote.calls.release_claim(A, "s", 2)
    assert not remote.calls.try_claim_call(A, "s", "1.0", 2), "only its own attempt gives a claim up"
    remote.calls.put(A, call, 4e9, "0.0")
    assert remote.calls.try_claim_call(A, "s", "1.0", 2), "the one before has begun, and can be taken over"
    data.processes.remove_process("1.0")
    assert remote.calls.try_claim_call(A, "s", "0.0", 4)
    remote.calls.release_claim(A, "s", 4)
    assert remote.calls.try_claim_call(A, "s", "0.0", 5)


@pytest.mark.parametrize(
    "refusal", [sqlite3.OperationalError("database or disk is full"), OSError(28, "No space left")]
)
def test_disk_error_is_raised_in_rpc_caller(
    both: tuple[DataDir, DataDir], refusal: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise refusal

    monkeypatch.setattr(type(both[0].processes), "delete_due_data", refuse)
    with pytest.raises(type(refusal)) as caught:
        both[1].processes.delete_due_data()
    assert str(caught.value) == str(refusal)


def test_undeclared_rpc_method_is_rejected(both: tuple[DataDir, DataDir]) -> None:
    with pytest.raises(KeyError):
        both[1].calls.handle_process_end("0.0")
    for method in ("Calls.handle_process_end", "Calls.__init__", "DataDir.close", "os.system"):
        assert b"KeyError" in serve_data_dir_call(both[0], msgspec.msgpack.encode([method, ["0.0"]]))
    assert b"Failed" in serve_data_dir_call(both[0], b"\xc1no msgpack")
