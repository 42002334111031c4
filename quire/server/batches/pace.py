"""How many lines of batches are answered beside other requests, so that these hardly wait longer.

A line makes others wait in two ways: its beginning holds up the event loop for two milliseconds, and its rows make
steps longer. So lines begin one by one, some time apart; none begins while another request waits for its first token;
and only so many are answered at a time as hardly lengthen a step, which is measured.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from weakref import WeakKeyDictionary

from quire.engine import clock
from quire.engine.core.history import Step
from quire.engine.link.client import EngineClient

OWN = "/batches"
"""The end of the names under which batches ask."""
_QUEUED = 256
"""Prompt tokens of lines that may wait while there are no other requests. A request that arrives waits for the step
under way, so steps are kept short."""
_CALM_SECONDS = 1.0
"""For so long after another request, a further one is expected."""
_APART_SECONDS = 0.015
"""Between the begins of two lines beside requests of others: a line takes the event loop two milliseconds."""
_LONGER = 1.25
"""Steps with lines may take so many times as long as those without, or with one line alone."""
_LATELY = 16
"""Steps in whose number an older one counts for little."""


class StepTimes:
    """How long recent steps took that gave each of their sequences one token, by the number of sequences."""

    def __init__(self) -> None:
        self._seconds: dict[int, float] = {}
        """By the number of sequences."""

    def learn(self, step: Step) -> None:
        record = step.record
        if record.rows == record.tokens:
            now = record.computed - record.decided
            known = self._seconds.setdefault(record.rows, now)
            self._seconds[record.rows] = known + (now - known) / _LATELY

    def alike(self, rows: int, fewer: int) -> bool:
        """Whether steps with `rows` sequences are known to take hardly longer than those with `fewer`. Where none with
        `rows` was seen, those with one less count."""
        known, least = (self._seconds.get(rows) or self._seconds.get(rows - 1)), self._seconds.get(fewer)
        return known is not None and least is not None and known <= _LONGER * least


class Pace:
    """Says when the next line may begin."""

    def __init__(self, clients: Callable[[], list[EngineClient]]) -> None:
        """`clients`: of all engines, which know what else there is to do."""
        self._clients = clients
        self._times = WeakKeyDictionary[EngineClient, StepTimes]()
        self._others_at = self._begun_at = -inf
        """When requests of others were open last, and when a line was begun."""

    def holds(self, begun: int) -> bool:
        """Whether the next line has to wait, while `begun` lines are being answered."""
        clients, now = self._clients(), clock.monotonic()
        names = (item for each in clients for item in each.open_everywhere.items())
        others = sum(count for name, count in names if not name.endswith(OWN))
        queued = sum(each.queued_tokens for each in clients)
        if others:
            self._others_at = now
        if now - self._others_at >= _CALM_SECONDS:
            return queued > _QUEUED
        since = now - self._begun_at
        if since < _APART_SECONDS or (others and queued and since < _CALM_SECONDS):
            return True
        return begun > 0 and not all(self._known(each).alike(others + begun + 1, others or 1) for each in clients)

    def begin(self) -> None:
        """A line begins."""
        self._begun_at = clock.monotonic()

    def _known(self, client: EngineClient) -> StepTimes:
        if (times := self._times.get(client)) is None:
            times = self._times[client] = StepTimes()
            client.history.listeners.append(times.learn)
        return times
