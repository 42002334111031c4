"""When the journal deletes calls: never one that has not ended."""

from __future__ import annotations

import time
from pathlib import Path

from quire.server.durability.data_dir import open_data_dir
from quire.server.durability.journal import JournaledCall, PinnedReplayFields
from quire.server.store.database import ROW_OVERHEAD_BYTES
from tests.server.store.test_response_store import BIG, response

OVER, LATER = time.time() - 1, time.time() + 1_000_000


def call(id: str, key: str | None = None, body: bytes = b"{}") -> JournaledCall:
    return JournaledCall(
        path="/v1/responses", body=body, pins=PinnedReplayFields(id=id, name="", created=0, seed=1), key=key
    )


def test_journal_keeps_call_of_unfinished_response_past_expiry(tmp_path: Path) -> None:
    data = open_data_dir(tmp_path, BIG)
    data.calls.put("me", call("going", "key"), OVER, "a")
    data.calls.put("me", call("ended", "other key"), OVER, "a")
    data.store.put("me", response("going", unfinished=True))
    data.store.put("me", response("ended"))
    data.close()  # the state after a power cut
    data = open_data_dir(tmp_path, BIG)
    data.calls.delete_expired_calls()
    assert data.processes.list_abandoned_responses() == [("me", "going")]
    assert data.calls.find("me", "going") == data.calls.find_by_idempotency_key("me", "key") == call("going", "key")
    assert not data.calls.put("me", call("another", "key"), LATER, "b"), "it would be answered twice"
    assert data.calls.find("me", "ended") is None
    assert data.calls.put("me", call("another", "other key"), LATER, "b")
    data.store.put("me", response("going"))
    data.calls.delete_expired_calls()
    assert data.calls.find("me", "going") is None
    data.close()


def test_journal_keeps_expired_call_while_process_answers(tmp_path: Path) -> None:
    data = open_data_dir(tmp_path, BIG)
    assert data.calls.put("me", call("one", "key"), OVER, "a")
    data.calls.delete_expired_calls()
    assert data.calls.find("me", "one") == data.calls.find_by_idempotency_key("me", "key") == call("one", "key")
    assert not data.calls.put("me", call("two", "key"), LATER, "b")
    data.calls.remove_answering_process("me", "one", "a")
    assert data.calls.find("me", "one") is None
    data.calls.delete_expired_calls()
    assert data.calls.stored_bytes == 0
    data.close()


def test_journal_quota_evicts_finished_calls_first(tmp_path: Path) -> None:
    large = b"x" * 1000
    data = open_data_dir(tmp_path, 4 * (ROW_OVERHEAD_BYTES + len(large)))
    data.store.put("me", response("left", unfinished=True))
    for id in ("left", "answered", "ended"):
        data.calls.put("me", call(id, body=large), LATER + len(id), "a")
    for id in ("left", "ended"):
        data.calls.remove_answering_process("me", id, "a")
    for number in range(5):
        data.calls.put("me", call(str(number), body=large), LATER + 100, "a")
        data.calls.remove_answering_process("me", str(number), "a")
    remaining = [id for id in ("left", "answered", "ended", "3", "4") if data.calls.find("me", id) is not None]
    assert remaining == ["left", "answered", "3", "4"]
    data.close()
