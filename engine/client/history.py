"""What happened to each request and in each step: recorded by the engine, kept by whoever holds its client.

The engine sends a step's record with the step's outputs. All requests of the step share the record, so a token costs
one reference. The history outlives engines and is bounded: it keeps the requests that ended last, and a limited number
of steps of each.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import monotonic
from typing import Literal

from quire.engine.batch import Batch
from quire.engine.types import Phase, Request, RequestOutput, StepRecord

TimelinePhase = Phase | Literal["recompute", "recovering", "delivery"]
"""The scheduler's phases, and three that only the client knows: prefill again after a preemption or a crash, waiting
for a new engine after a crash, and waiting for the last output to arrive."""
KEPT_REQUESTS = 1000
KEPT_STEPS = 2000
"""Per request; later steps are only counted."""
KEPT_IN_ALL = 100_000
"""Steps of all ended requests together, at most some 500 bytes each. Beyond that the requests that ended first lose
their steps and keep their phases."""


def step_record(batch: Batch, number: int, times: tuple[float, float, float, float]) -> StepRecord:
    """The record of one step of the engine.

    `times` are those of time.monotonic() at which the step began, was scheduled, was computed and was applied.
    """
    admitted = {admission.slot for admission in batch.admissions}
    chunks = [
        (row.request_id, row.start, row.count)
        for row in batch.rows
        if row.count - len(row.draft_ids) > 1 or not row.sample or row.slot in admitted
    ]
    tokens = sum(row.count for row in batch.rows)
    return StepRecord(number, *times, len(batch.rows), tokens, chunks, batch.preempted)


@dataclass(frozen=True, slots=True)
class Step:
    """A step, and the requests that took part in it."""

    record: StepRecord
    engine: int
    """Number of the engine process, from 0; each crash adds one."""
    ids: tuple[str, ...]


@dataclass(slots=True)
class Timeline:
    """What happened to one request. `marks` are the times at which its phases began, in order."""

    id: str
    prompt_tokens: int
    submitted: float
    marks: list[tuple[float, TimelinePhase]]
    steps: list[Step] = field(default_factory=list)
    more_steps: int = 0
    chunks: list[tuple[Step, int, int]] = field(default_factory=list)
    """(step, first token, tokens)."""
    cached_tokens: int | None = None
    output_tokens: int = 0
    first_token: float | None = None
    ended: float | None = None
    finish_reason: str | None = None

    def phases(self, now: float) -> dict[str, float]:
        """Seconds spent in each phase. They sum to the time from the submission to the end, or to `now` while open."""
        found: dict[str, float] = {}
        for phase, began, end in self.intervals(now):
            found[phase] = found.get(phase, 0.0) + end - began
        return found

    def intervals(self, now: float) -> list[tuple[TimelinePhase, float, float]]:
        """The phases in order, each with the times of its begin and its end."""
        ends = [*(at for at, _ in self.marks[1:]), now if self.ended is None else self.ended]
        return [(phase, began, end) for (began, phase), end in zip(self.marks, ends, strict=True)]

    def count(self, phase: TimelinePhase) -> int:
        """How often the request entered `phase`."""
        return sum(each == phase for _, each in self.marks)

    def enter(self, phase: TimelinePhase, at: float) -> None:
        """Begin a phase. Marks never run backwards, though two processes read the clock."""
        if self.marks[-1][1] != phase:
            self.marks.append((max(at, self.marks[-1][0]), phase))

    def end(self, reason: str, at: float) -> None:
        self.ended = max(at, self.marks[-1][0])
        self.finish_reason = reason


class History:
    """Timelines of open requests and of those that ended last."""

    def __init__(self, keep: int = KEPT_REQUESTS) -> None:
        self.keep = keep
        """How many ended requests to remember."""
        self.listeners: list[Callable[[Step], None]] = []
        """Called with every step."""
        self.end_listeners: list[Callable[[Timeline], None]] = []
        """Called with every request that has ended."""
        self._open: dict[str, Timeline] = {}
        self._ended: dict[str, Timeline] = {}
        self._order: deque[str] = deque()
        self._detailed: deque[Timeline] = deque()
        self._kept_steps = 0
        self._engine = 0

    def of(self, job: str) -> list[Timeline]:
        """The timelines of one answer's sequences, whose ids begin with the answer's id `job`."""
        return [each for each in [*self._open.values(), *self._ended.values()] if each.id.startswith(f"{job}-")]

    @property
    def open(self) -> list[Timeline]:
        return list(self._open.values())

    @property
    def ended(self) -> list[Timeline]:
        """Timelines of ended requests; the one that ended last comes last."""
        return [self._ended[request_id] for request_id in self._order]

    def submitted(self, request: Request) -> None:
        now = monotonic()
        self._open[request.id] = Timeline(request.id, len(request.prompt_ids), now, [(now, "queued")])

    def stepped(self, outputs: Sequence[RequestOutput], record: StepRecord | None) -> None:
        """Take in the outputs of a step. Without a record they come from adding or aborting requests."""
        if record is not None:
            self._take(outputs, record)
        for output in outputs:
            if output.finish_reason is not None:
                self.end(output.id, output.finish_reason)

    def _take(self, outputs: Sequence[RequestOutput], record: StepRecord) -> None:
        picked = [output.id for output in outputs if output.new_ids]
        chunked = [request_id for request_id, _, _ in record.chunks]
        step = Step(record, self._engine, tuple(dict.fromkeys([*chunked, *picked])))
        for request_id in record.preempted:
            if (timeline := self._open.get(request_id)) is not None:
                timeline.enter("preempted", record.began)
        for request_id, start, count in record.chunks:
            if (timeline := self._open.get(request_id)) is not None:
                timeline.chunks.append((step, start, count))
                timeline.enter("prefill" if timeline.output_tokens == 0 else "recompute", record.began)
        for request_id in step.ids:
            if (timeline := self._open.get(request_id)) is not None:
                if len(timeline.steps) < KEPT_STEPS:
                    timeline.steps.append(step)
                else:
                    timeline.more_steps += 1
        for output in outputs:
            if output.new_ids and (timeline := self._open.get(output.id)) is not None:
                timeline.output_tokens += len(output.new_ids)
                if timeline.cached_tokens is None:
                    timeline.cached_tokens = output.cached_tokens
                    timeline.first_token = record.ended
                timeline.enter("decode", record.ended)
                if output.finish_reason is not None:
                    timeline.enter("delivery", record.ended)
        for listener in self.listeners:
            listener(step)

    def engine_died(self, *, for_good: bool = False) -> None:
        """Open requests wait for another engine; with `for_good` they end with this one."""
        self._engine += 1
        now = monotonic()
        for timeline in list(self._open.values()):
            if for_good:
                self.end(timeline.id, "error")
            else:
                timeline.enter("recovering", now)

    def end(self, request_id: str, reason: str) -> None:
        """End a request. Does nothing when it is not open."""
        timeline = self._open.pop(request_id, None)
        if timeline is None:
            return
        timeline.end(reason, monotonic())
        for listener in self.end_listeners:
            listener(timeline)
        if self.keep:
            self._ended[request_id] = timeline
            self._order.append(request_id)
            self._detailed.append(timeline)
            self._kept_steps += len(timeline.steps)
        while len(self._order) > self.keep:
            del self._ended[self._order.popleft()]
        while self._kept_steps > KEPT_IN_ALL or len(self._detailed) > self.keep:
            oldest = self._detailed.popleft()
            self._kept_steps -= len(oldest.steps)
            oldest.more_steps += len(oldest.steps)
            oldest.steps, oldest.chunks = [], []
