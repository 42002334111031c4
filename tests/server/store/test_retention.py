"""Retention deletes responses some days after their creation, and nothing else. Responses of an earlier version have
the same time from the first start of this one.
"""

from __future__ import annotations

import logging
import sqlite3
from functools import partial
from pathlib import Path

import pytest

from quire.server.durability.data_dir import DataDir, open_data_dir
from quire.server.store.garbage import MAX_TRANSACTION_ROWS
from quire.server.store.response_store import ObjectToStore, ObjectWithoutItems
from quire.server.store.sweeper import SECONDS_PER_DAY
from tests.machine import set_clock
from tests.server.durability.test_journal import call
from tests.server.statements import Counted
from tests.server.store.test_response_store import BIG, conversation, item, response
from tests.server.store.version_2 import write_version_2

A = "a"
BEGIN = 1_800_000_000.0


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = BEGIN
        set_clock(monkeypatch, monotonic=lambda: self.now, time=lambda: self.now)

    def sweep(self, data: DataDir, days: float = 0.0) -> None:
        """Delete all that is due `days` later."""
        self.now += days * SECONDS_PER_DAY + 61  # a minute lies between two passes
        while data.processes.delete_due_data():
            pass


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def continuing_response(id: str, previous: str) -> ObjectToStore:
    return ObjectToStore(
        id, ObjectWithoutItems("response", {"status": "completed", "previous": previous}, b"{}"), [item("i")]
    )


def stored_ids(data: DataDir, *ids: str) -> list[str]:
    return [id for id in ids if data.store.get_summary(A, "response", id) is not None]


def test_retention_deletes_only_old_finished_responses(tmp_path: Path, clock: Clock) -> None:
    data = open_data_dir(tmp_path, BIG, retention_seconds=30 * SECONDS_PER_DAY)
    data.store.put(A, response("old", "i"))
    data.store.put(A, response("going", "i", unfinished=True))
    data.store.put(A, conversation("talk", "i"))
    data.calls.put(A, call("going"), BEGIN, "0")
    clock.sweep(data, 29)
    data.store.put(A, response("new", "i"))
    assert stored_ids(data, "old", "going", "new") == ["old", "going", "new"]
    clock.sweep(data, 1.01)
    assert stored_ids(data, "old", "going", "new") == ["going", "new"]
    assert data.store.get_summary(A, "conversation", "talk") is not None
    assert data.calls.find(A, "going") is not None
    data.store.put(A, response("going", "i"))
    clock.sweep(data)
    assert stored_ids(data, "going") == [], "its age counts from its creation, not from its end"
    data.close()
    data = open_data_dir(tmp_path, BIG, retention_seconds=0)
    clock.sweep(data, 10_000)
    assert stored_ids(data, "new") == ["new"], "0 keeps all"
    data.close()


def test_retention_keeps_responses_that_newer_responses_continue(tmp_path: Path, clock: Clock) -> None:
    data = open_data_dir(tmp_path, BIG, retention_seconds=30 * SECONDS_PER_DAY)
    data.store.put(A, response("1"))
    data.store.put(A, continuing_response("2", "1"))
    data.store.put("b", response("1"))
    clock.sweep(data, 20)
    data.store.put(A, continuing_response("3", "2"))
    clock.sweep(data, 20)
    assert stored_ids(data, "1", "2", "3") == ["1", "2", "3"], "a live one continues them"
    assert data.store.get_summary("b", "response", "1") is None, (
        "another owner's response of this name continues nothing"
    )
    clock.sweep(data, 20)
    assert stored_ids(data, "1", "2", "3") == []
    assert data.store.stored_bytes == 0
    data.close()


def test_retention_deletes_due_responses_over_many_transactions(tmp_path: Path, clock: Clock) -> None:
    data = open_data_dir(tmp_path, BIG, retention_seconds=SECONDS_PER_DAY)
    count = 3 * MAX_TRANSACTION_ROWS
    for number in range(count):
        data.store.put(A, response(str(number), "i", "j"))
    data.store.put(A, response("long", *map(str, range(2 * MAX_TRANSACTION_ROWS))))
    clock.now += SECONDS_PER_DAY + 1
    for number in range(count // 2):
        data.store.put(A, continuing_response(f"next {number}", str(number)))
    clock.sweep(data)
    assert stored_ids(data, *map(str, range(count)), "long") == [*map(str, range(count // 2))]
    data.close()


@pytest.mark.parametrize("retention", [30 * SECONDS_PER_DAY, 0.0])
def test_retention_of_version_2_responses_starts_at_upgrade(
    tmp_path: Path, clock: Clock, caplog: pytest.LogCaptureFixture, retention: float
) -> None:
    write_version_2(tmp_path, {"1": None, "2": "1", "3": None}, at=BEGIN - 1000 * SECONDS_PER_DAY)
    clock.now += 40 * SECONDS_PER_DAY  # the machine was off
    with caplog.at_level(logging.WARNING):
        data = open_data_dir(tmp_path, BIG, retention_seconds=retention)
    warning = "3 stored responses will be deleted on 2027-03-26, 30 days from now"
    assert (warning in caplog.text) == bool(retention)
    clock.sweep(data, 29)
    data.close()
    caplog.clear()
    data = open_data_dir(tmp_path, BIG, retention_seconds=retention)
    assert "will be deleted" not in caplog.text, "it is said once"
    data.store.put(A, continuing_response("4", "3"))
    clock.sweep(data, 1.01)
    assert stored_ids(data, "1", "2", "3", "4") == (["3", "4"] if retention else ["1", "2", "3", "4"])
    data.close()


def max_sweep_instructions(folder: Path, clock: Clock, count: int) -> int:
    """The most SQLite instructions of one statement while `count` responses of an earlier version are due, and a newer
    response continues all of them.
    """
    folder.mkdir()
    before = {str(number): str(number - 1) if number else None for number in range(count)}
    write_version_2(folder, before, at=BEGIN - 1000 * SECONDS_PER_DAY, items=0)
    data = open_data_dir(
        folder, BIG, retention_seconds=SECONDS_PER_DAY, connect=partial(sqlite3.connect, factory=Counted)
    )
    clock.now += SECONDS_PER_DAY + 1
    data.store.put(A, continuing_response("new", str(count - 1)))
    Counted.counts.clear()
    clock.sweep(data)
    assert stored_ids(data, *before) == [*before]
    data.close()
    return max(times for text, times in Counted.counts.items() if text.startswith("select created, rowid"))


def test_retention_sweep_cost_is_independent_of_kept_responses(tmp_path: Path, clock: Clock) -> None:
    """In an upgraded store each step visited every kept response of an earlier version again."""
    few, many = (max_sweep_instructions(tmp_path / str(count), clock, count) for count in (200, 1200))
    assert many < 1.5 * few
