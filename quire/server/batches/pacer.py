"""How many lines of batches are answered beside other requests, so that these hardly wait longer.

A line makes others wait in two ways: its beginning holds up the event loop for two milliseconds, and its rows make
steps longer. So lines begin one by one, some time apart; none begins while another request waits for its first token;
and only so many are answered at a time as hardly lengthen a step, which is measured.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from weakref import WeakKeyDictionary

from quire.engine.client.engine_client import EngineClient
from quire.engine.common import clock
from quire.engine.core.request_history import StepEntry

BATCH_TENANT_SUFFIX = "/batches"
"""The end of the names under which batches ask."""
_MAX_QUEUED_TOKENS = 256
"""Prompt tokens of lines that may wait while there are no other requests. A request that arrives waits for the step
under way, so steps are kept short."""
_QUIET_SECONDS = 1.0
"""For so long after another request, a further one is expected."""
_LINE_INTERVAL_SECONDS = 0.015
"""Between the begins of two lines beside requests of others: a line takes the event loop two milliseconds."""
_MAX_SLOWDOWN = 1.25
"""Steps with lines may take so many times as long as those without, or with one line alone."""
_SMOOTHING_STEPS = 16
"""Steps in whose number an older one counts for little."""


class StepTimesByRequestCount:
    """How long recent steps took that gave each of their sequences one token, by the number of sequences."""

    def __init__(self) -> None:
        self._seconds: dict[int, float] = {}
        """By the number of sequences."""

    def record_step_time(self, step: StepEntry) -> None:
        record = step.record
        if record.num_requests == record.num_tokens:
            seconds = record.computed_at - record.scheduled_at
            average = self._seconds.setdefault(record.num_requests, seconds)
            self._seconds[record.num_requests] = average + (seconds - average) / _SMOOTHING_STEPS

    def is_similarly_fast(self, num_requests: int, baseline_requests: int) -> bool:
        """Whether steps with `num_requests` sequences are known to take hardly longer than those with
        `baseline_requests`. Where none with `num_requests` was seen, those with one less count."""
        seconds, baseline_seconds = (
            (self._seconds.get(num_requests) or self._seconds.get(num_requests - 1)),
            self._seconds.get(baseline_requests),
        )
        return seconds is not None and baseline_seconds is not None and seconds <= _MAX_SLOWDOWN * baseline_seconds


class BatchPacer:
    """Says when the next line may begin."""

    def __init__(self, clients: Callable[[], list[EngineClient]]) -> None:
        """`clients`: of all engines, which know what else there is to do."""
        self._clients = clients
        self._step_times = WeakKeyDictionary[EngineClient, StepTimesByRequestCount]()
        self._others_seen_at = self._line_started_at = -inf
        """When requests of others were open last, and when a line was begun."""

    def must_wait(self, num_running: int) -> bool:
        """Whether the next line has to wait, while `num_running` lines are being answered."""
        clients, now = self._clients(), clock.monotonic()
        names = (item for each in clients for item in each.open_everywhere.items())
        num_others = sum(count for name, count in names if not name.endswith(BATCH_TENANT_SUFFIX))
        queued = sum(each.queued_tokens for each in clients)
        if num_others:
            self._others_seen_at = now
        if now - self._others_seen_at >= _QUIET_SECONDS:
            return queued > _MAX_QUEUED_TOKENS
        seconds_since_start = now - self._line_started_at
        if seconds_since_start < _LINE_INTERVAL_SECONDS or (
            num_others and queued and seconds_since_start < _QUIET_SECONDS
        ):
            return True
        return num_running > 0 and not all(
            self._step_times_of(each).is_similarly_fast(num_others + num_running + 1, num_others or 1)
            for each in clients
        )

    def record_line_start(self) -> None:
        """A line begins."""
        self._line_started_at = clock.monotonic()

    def _step_times_of(self, client: EngineClient) -> StepTimesByRequestCount:
        if (times := self._step_times.get(client)) is None:
            times = self._step_times[client] = StepTimesByRequestCount()
            client.history.listeners.append(times.record_step_time)
        return times
