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
from quire.server.peers import make_blocking_data_dir_call
from quire.server.store.batches import Batch, BatchError, Batches, BatchLine, LineResult
from quire.server.store.data_dir import DataDir, open_data_dir
from quire.server.store.data_dir_rpc import RPC_METHODS, remote_data_dir, serve_data_dir_call
from quire.server.store.files import new_file
from quire.server.store.journal import JournaledCall, PinnedReplayFields, ProgressUpdate
from quire.server.store.progress import CallProgress, ChoiceFinish
from quire.server.store.response_store import ConversationLimits, ObjectToStore, ObjectWithoutItems, StoredItem

A = "a"
RESULT = b'{"response":{"body":{}}}'


@pytest.fixture
def both(tmp_path: Path) -> Iterator[tuple[DataDir, DataDir]]:
    """The data directory, and a remote one that calls it."""
    data = open_data_dir(tmp_path, 1 << 20)
    yield data, remote_data_dir(tmp_path, partial(serve_data_dir_call, data))
    data.close()


def test_each_method_has_types_that_pass(both: tuple[DataDir, DataDir]) -> None:
    for name in RPC_METHODS:
        wrong = msgspec.msgpack.encode([name, [{}] * 9])
        assert b"Validation" in serve_data_dir_call(both[0], wrong), f"{name} takes anything"


def test_objects_pass(both: tuple[DataDir, DataDir]) -> None:
    own, asked = both[0].store, both[1].store
    items = [StoredItem("i1", b"{}"), StoredItem("i2", b'{"a":1}')]
    asked.put(A, ObjectToStore("c", ObjectWithoutItems("conversation", {"n": [1, None, 0.5]}, b"{}"), items))
    assert asked.get_without_items(A, "conversation", "c") == own.get_without_items(A, "conversation", "c")
    assert asked.get_summary(A, "conversation", "c") == own.get_summary(A, "conversation", "c")
    assert asked.read_item_page(A, "c", 1, newest_first=True, after=None) == own.read_item_page(
        A, "c", 1, newest_first=True, after=None
    )
    assert asked.get_without_items(A, "response", "c") is None
    with pytest.raises(InvalidRequest, match="at most 2 items") as caught:
        asked.append_items(A, "c", items, ConversationLimits(2, 1000))
    assert caught.value.param == "items"
    assert asked.append_items(A, "c", [StoredItem("i3", b"{}")])
    assert asked.replace_metadata(A, "c", {"k": "v"}) == b'{"metadata":{"k":"v"}}'


def test_batches_pass(both: tuple[DataDir, DataDir]) -> None:
    data, asked = both
    file = new_file("in.jsonl", "batch", 2, keep_seconds=None)
    asked.contents.write_content(file.id, BytesIO(b"{}"))
    asked.files.add(A, file)
    assert asked.files.find(A, file.id) == file
    batch = Batch(
        id="b", endpoint="/v1/completions", input_file_id=file.id, completion_window="24h", created_at=1, expires_at=9
    )
    assert asked.batches.add(A, batch, 1)
    assert asked.batches.list_open_batches() == [(A, batch)] == data.batches.list_open_batches()
    now = msgspec.structs.replace(batch, status="in_progress", errors=(BatchError("c", "m", 1),))
    asked.batches.store_lines_and_batch(A, now, [BatchLine(0, 1, 0, 2, "x"), BatchLine(1, 2, 2, 2, "y")])
    assert asked.batches.list_unanswered_lines("b", -1, 9) == data.batches.list_unanswered_lines("b", -1, 9)
    asked.batches.put_result("b", LineResult(0, failed=False, line=b"\x00{}"))
    assert asked.batches.list_result_lines("b", 0, failed=False) == [(1, b"\x00{}")]
    found = asked.batches.page(A, 5, None)
    assert found is not None
    assert (list(found[0]), found[1]) == ([data.batches.find(A, "b")], False)
    cancelled = asked.batches.cancel(A, "b")
    assert cancelled is not None
    assert cancelled.status == "cancelling"
    asked.batches.end(A, msgspec.structs.replace(cancelled, status="cancelled"), [])
    with pytest.raises(InvalidRequest, match="is cancelled already"):
        asked.batches.cancel(A, "b")
    assert asked.files.delete(A, file.id)


class _Replaced:
    """A data directory whose owning process is replaced by another while remote callers go on."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.data = open_data_dir(folder, 1 << 20)
        self.asked = remote_data_dir(folder, self._answer)
        self.before = b"nothing"
        """Replace the owner before it serves the first call of this method; once."""

    def _answer(self, asked: bytes) -> bytes:
        if self.before in asked:
            self.before = b"nothing"
            self.replace()
        return serve_data_dir_call(self.data, asked)

    def replace(self) -> None:
        self.data.close()
        self.data = open_data_dir(self._folder, 1 << 20, {"0.1"})


def test_a_file_whose_content_was_taken_away_before_it_is_known_is_refused(tmp_path: Path) -> None:
    """A new owner deletes files that it does not know, such as one that a live process has just written."""
    shared = _Replaced(tmp_path)
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


def _answered(batches: Batches) -> Batch:
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


def test_a_batch_ends_with_its_results_whoever_has_the_data_meanwhile(tmp_path: Path) -> None:
    shared = _Replaced(tmp_path)
    batches, contents = shared.asked.batches, shared.asked.contents
    now = _answered(batches)
    shared.before = b"Batches.end"
    with pytest.raises(FileNotFoundError):
        finish_batch(batches, contents, A, now)
    assert shared.data.batches.list_open_batches() == [(A, now)], "it is ended later, as when the disk was full"
    finish_batch(batches, contents, A, now)
    _check_results(shared.data)
    shared.data.close()


class _Late:
    """A link whose response to Batches.end does not arrive before this process ends."""

    def __init__(self, data: DataDir) -> None:
        self._data = data
        self.answering = Answering()
        self.identity = "0.1"
        self.done = asyncio.Event()

    async def ask(self, topic: str, body: bytes = b"", *, to: str | None = None) -> list[bytes]:
        said = serve_data_dir_call(self._data, body)
        if b"Batches.end" in body:
            self.done.set()
            await asyncio.sleep(3600)
        return [said]


def test_a_process_that_is_stopped_leaves_the_results_of_a_batch_that_has_ended(tmp_path: Path) -> None:
    data = open_data_dir(tmp_path, 1 << 20)
    now = _answered(data.batches)

    async def live() -> None:
        link = _Late(data)
        asked = remote_data_dir(tmp_path, make_blocking_data_dir_call(link))
        asyncio.get_running_loop().run_in_executor(None, finish_batch, asked.batches, asked.contents, A, now)
        await link.done.wait()

    process = threading.Thread(target=asyncio.run, args=(live(),))
    process.start()
    process.join()
    _check_results(data)
    data.close()


def test_calls_pass(both: tuple[DataDir, DataDir]) -> None:
    data, asked = both
    pins = PinnedReplayFields(id="s", name="", created=1, seed=2**63 - 1, before=("f",))
    progress = CallProgress([[1, 2]], [0], [ChoiceFinish("stop", "x", came_with_token=True)])
    assert asked.calls.put(
        A, JournaledCall(path="/v1/completions", body=b"\xff", pins=pins, progress=progress), 4e9, "0.0"
    )
    assert asked.calls.find(A, "s") == data.calls.find(A, "s")
    assert asked.calls.answering_process(A, "s") == "0.0"
    more = CallProgress([[1, 2, 3]], [0], [None])
    asked.calls.update_progress([ProgressUpdate(A, "s", more, 4e9, is_complete=False)], "0.0")
    found = asked.calls.find(A, "s")
    assert found is not None
    assert found.progress == more
    assert asked.processes.exchange_status("0.0", {"open": 2}) == data.processes.exchange_status("0.0", {"open": 2})


def test_one_attempt_at_a_time_answers_a_call_again(both: tuple[DataDir, DataDir]) -> None:
    data, asked = both
    call = JournaledCall(
        path="/v1/completions", body=b"{}", pins=PinnedReplayFields(id="s", name="", created=1, seed=1)
    )
    assert asked.calls.try_claim_call(A, "s", "0.0", 1)
    assert not asked.calls.try_claim_call(A, "s", "1.0", 2), "another process"
    assert not data.calls.try_claim_call(A, "s", "0.0", 3), "the same one"
    asked.calls.release_claim(A, "s", 2)
    assert not asked.calls.try_claim_call(A, "s", "1.0", 2), "only its own attempt gives a claim up"
    asked.calls.put(A, call, 4e9, "0.0")
    assert asked.calls.try_claim_call(A, "s", "1.0", 2), "the one before has begun, and can be taken over"
    data.processes.remove_process("1.0")
    assert asked.calls.try_claim_call(A, "s", "0.0", 4)
    asked.calls.release_claim(A, "s", 4)
    assert asked.calls.try_claim_call(A, "s", "0.0", 5)


@pytest.mark.parametrize(
    "refusal", [sqlite3.OperationalError("database or disk is full"), OSError(28, "No space left")]
)
def test_a_refusal_of_the_disk_passes(
    both: tuple[DataDir, DataDir], refusal: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise refusal

    monkeypatch.setattr(type(both[0].processes), "delete_due_data", refuse)
    with pytest.raises(type(refusal)) as caught:
        both[1].processes.delete_due_data()
    assert str(caught.value) == str(refusal)


def test_nothing_else_can_be_asked_for(both: tuple[DataDir, DataDir]) -> None:
    with pytest.raises(KeyError):
        both[1].calls.handle_process_end("0.0")
    for method in ("Calls.handle_process_end", "Calls.__init__", "DataDir.close", "os.system"):
        assert b"KeyError" in serve_data_dir_call(both[0], msgspec.msgpack.encode([method, ["0.0"]]))
    assert b"Failed" in serve_data_dir_call(both[0], b"\xc1no msgpack")
