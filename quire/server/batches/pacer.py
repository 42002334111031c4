"""Limits how many batch lines run, so that other requests are hardly delayed. Lines start one by one, and not while
another request waits for its first token. The number of running lines stays so small that the measured steps take
hardly longer.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from weakref import WeakKeyDictionary

from quire.engine.client.engine_client import EngineClient
from quire.engine.client.request_history import StepEntry
from quire.engine.common import clock

BATCH_TENANT_SUFFIX = "/batches"
_MAX_QUEUED_TOKENS = 256
"""While no normal request runs, no further line starts if more prompt tokens than this wait. This keeps steps short,
because a new request waits for the running step.
"""
_QUIET_SECONDS = 1.0
"""For this many seconds after a normal request, another normal request is expected."""
_LINE_INTERVAL_SECONDS = 0.015
"""Minimum time between starts of lines while normal requests run or are expected, because a start takes 2 ms of the
event loop.
"""
_MAX_SLOWDOWN = 1.25
_SMOOTHING_STEPS = 16


class StepTimesByRequestCount:
    def __init__(self) -> None:
        self._seconds: dict[int, float] = {}
        """Average seconds of a step in which each request computes one token, by number of requests."""

    def record_step_time(self, step: StepEntry) -> None:
        record = step.record
        if record.num_requests == record.num_tokens:
            seconds = record.computed_at - record.scheduled_at
            average = self._seconds.setdefault(record.num_requests, seconds)
            self._seconds[record.num_requests] = average + (seconds - average) / _SMOOTHING_STEPS

    def is_similarly_fast(self, num_requests: int, baseline_requests: int) -> bool:
        """If no step with `num_requests` was measured, a step with one request fewer is compared. Returns False if that
        is unknown too.
        """
        seconds, baseline_seconds = (
            (self._seconds.get(num_requests) or self._seconds.get(num_requests - 1)),
            self._seconds.get(baseline_requests),
        )
        return seconds is not None and baseline_seconds is not None and seconds <= _MAX_SLOWDOWN * baseline_seconds


class BatchPacer:
    def __init__(self, clients: Callable[[], list[EngineClient]]) -> None:
        self._clients = clients
        self._step_times = WeakKeyDictionary[EngineClient, StepTimesByRequestCount]()
        self._others_seen_at = self._line_started_at = -inf

    def must_wait(self, num_running: int) -> bool:
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
        self._line_started_at = clock.monotonic()

    def _step_times_of(self, client: EngineClient) -> StepTimesByRequestCount:
        if (times := self._step_times.get(client)) is None:
            times = self._step_times[client] = StepTimesByRequestCount()
            client.history.listeners.append(times.record_step_time)
        return times
