"""Lines of batches start next to other requests only if these hardly wait for it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from quire.engine.client.request_history import RequestHistory, StepEntry
from quire.engine.core.stats import StepRecord
from quire.server.batches.pacer import BATCH_TENANT_SUFFIX, BatchPacer, StepTimesByRequestCount
from tests.machine import set_clock

APART, LONG = 0.02, 2.0


@dataclass(eq=False)
class FakeClient:
    """The part of an engine client that BatchPacer reads."""

    open_everywhere: dict[str, int] = field(default_factory=dict)
    queued_tokens: int = 0
    history: RequestHistory = field(default_factory=RequestHistory)

    def step(self, rows: int, seconds: float, tokens: int | None = None) -> None:
        record = StepRecord(1, 0.0, 1.0, 1.0 + seconds, 2.0, rows, tokens or rows, (), ())
        for listener in self.history.listeners:
            listener(StepEntry(record, 0, ()))


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    set_clock(monkeypatch, monotonic=(fake_clock := Clock()))
    return fake_clock


def make_pacer(*clients: FakeClient) -> BatchPacer:
    engine_clients: Any = list(clients)
    return BatchPacer(lambda: engine_clients)


def test_lines_start_until_prompts_queue_when_only_batches_run(clock: Clock) -> None:
    client = FakeClient({f"a{BATCH_TENANT_SUFFIX}": 9})
    pace = make_pacer(client)
    assert not pace.must_wait(9)
    client.queued_tokens = 1000
    assert pace.must_wait(9)


def test_lines_are_spaced_and_yield_to_first_tokens_of_others(clock: Clock) -> None:
    client = FakeClient({"a": 1})
    pace = make_pacer(client)
    assert not pace.must_wait(0)
    pace.record_line_start()
    assert pace.must_wait(0)
    clock.now += APART
    assert not pace.must_wait(0)
    client.queued_tokens = 5
    assert pace.must_wait(0), "somebody waits for a first token"
    clock.now += LONG
    assert not pace.must_wait(0), "but a batch goes on, whoever waits"


def test_pacer_holds_back_for_second_after_other_requests_end(clock: Clock) -> None:
    client = FakeClient({"a": 1})
    pace = make_pacer(client)
    pace.must_wait(0)
    client.open_everywhere.clear()
    clock.now += 0.5
    assert pace.must_wait(1)
    clock.now += 1.0
    assert not pace.must_wait(1)


def test_pacer_starts_more_lines_while_steps_stay_as_fast(clock: Clock) -> None:
    client = FakeClient({"a": 1})
    pace = make_pacer(client)
    assert pace.must_wait(1), "nothing is known yet"
    client.step(1, 0.010)
    assert not pace.must_wait(0)
    assert pace.must_wait(1), "two rows were not seen"
    client.step(2, 0.011)
    assert not pace.must_wait(1), "three were not seen either, but two are as quick as one"
    for _ in range(50):
        client.step(3, 0.020)
    assert pace.must_wait(1)
    client.open_everywhere["b"] = 1
    client.step(4, 0.012)
    assert not pace.must_wait(1), "with two of others, and one of its own, a fourth row counts beside two"


def test_steps_with_prefill_or_drafts_are_not_timed() -> None:
    times = StepTimesByRequestCount()
    for tokens in (5, 3):
        times.record_step_time(StepEntry(StepRecord(1, 0, 0, 1, 1, 2, tokens, (), ()), 0, ()))
    assert not times.is_similarly_fast(2, 2)
