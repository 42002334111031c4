"""Timelines of requests and steps. They are in the client's process, so they outlive engines."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import msgspec

from quire.engine.common import clock
from quire.engine.common.types import EngineCoreOutput, EngineCoreRequest, PrefixMissReport
from quire.engine.core.stats import Phase, StepRecord, add_counts, count_sources

TimelinePhase = Phase | Literal["recompute", "recovering", "delivery"]
"""The client adds to the engine's phases a repeated prefill; waiting for an engine after a crash, sleep or weight
change; and waiting for the delivery of the last output.
"""
MAX_REQUESTS = 1000
MAX_STEPS_PER_REQUEST = 2000
"""A request's later steps are counted but not stored."""
MAX_TOTAL_STEPS = 100_000
"""Limit of stored steps, of at most about 500 bytes each. Beyond it, the oldest ended requests keep only their phases.
"""


class StepEntry(msgspec.Struct, frozen=True, gc=False):
    record: StepRecord
    engine_number: int
    """A new engine after a crash, sleep or weight change gets a higher number."""
    request_ids: tuple[str, ...]
    replica: int = 0
    is_counted: bool = True
    """False if another API process counts the step in its metrics."""


@dataclass(slots=True)
class Timeline:
    id: str
    prompt_tokens: int
    submitted_at: float
    marks: list[tuple[float, TimelinePhase]]
    """(begin, phase) in order of time."""
    steps: list[StepEntry] = field(default_factory=list)
    num_dropped_steps: int = 0
    chunks: list[tuple[StepEntry, int, int]] = field(default_factory=list)
    """(step, first token, tokens)."""
    tier_loads: list[tuple[str, int, float, float]] = field(default_factory=list)
    """(tier, number of tokens, begin, end)."""
    image_tokens: int = 0
    cached_tokens: int | None = None
    prefix_report: PrefixMissReport | None = None
    output_tokens: int = 0
    draft_tokens: int = 0
    accepted_by_source: list[int] = field(default_factory=list)
    """Indexed as DRAFT_SOURCES; empty before the first draft."""
    first_token_at: float | None = None
    last_token_at: float = 0.0
    """0 before the first token."""
    ended_at: float | None = None
    finish_reason: str | None = None

    def phase_seconds(self, now: float) -> dict[str, float]:
        """The seconds add up to the time until the request's end, or until `now`."""
        seconds_by_phase: dict[str, float] = {}
        for phase, began, end in self.phase_intervals(now):
            seconds_by_phase[phase] = seconds_by_phase.get(phase, 0.0) + end - began
        return seconds_by_phase

    def phase_intervals(self, now: float) -> list[tuple[TimelinePhase, float, float]]:
        ends = [*(at for at, _ in self.marks[1:]), now if self.ended_at is None else self.ended_at]
        return [(phase, began, end) for (began, phase), end in zip(self.marks, ends, strict=True)]

    def count_phase(self, phase: TimelinePhase) -> int:
        return sum(each == phase for _, each in self.marks)

    def enter_phase(self, phase: TimelinePhase, at: float) -> None:
        """Times never decrease, although two processes read the clock."""
        if self.marks[-1][1] != phase:
            self.marks.append((max(at, self.marks[-1][0]), phase))

    def append_step(self, step: StepEntry) -> None:
        if len(self.steps) < MAX_STEPS_PER_REQUEST:
            self.steps.append(step)
        else:
            self.num_dropped_steps += 1

    def count_step_tokens(self, num_new: int, draft_sources: Sequence[int]) -> None:
        """The last new token is never a draft."""
        self.output_tokens += num_new
        if draft_sources:
            self.draft_tokens += len(draft_sources)
            self.accepted_by_source = add_counts(self.accepted_by_source, count_sources(draft_sources[: num_new - 1]))

    def mark_ended(self, reason: str, at: float) -> None:
        self.ended_at = max(at, self.marks[-1][0])
        self.finish_reason = reason


class RequestRecorder(Protocol):
    def record_submission(self, request: EngineCoreRequest) -> None: ...

    def record_step(self, outputs: Sequence[EngineCoreOutput], record: StepRecord | None, replica: int = 0) -> None:
        """`record` is None for outputs of adding or aborting requests."""

    def record_engine_death(
        self, replica: int = 0, ids: Iterable[str] | None = None, *, for_good: bool = False
    ) -> None:
        """Let the requests `ids` (None: all) wait for another engine, or end them if `for_good`."""

    def end_request(self, request_id: str, reason: str) -> None:
        """Ignores requests that are not open."""


class RequestHistory:
    def __init__(
        self, max_ended: int = MAX_REQUESTS, replicas: int = 1, clock: Callable[[], float] = lambda: clock.monotonic()
    ) -> None:
        self._clock = clock
        self.max_ended = max_ended
        self.listeners: list[Callable[[StepEntry], None]] = []
        self.end_listeners: list[Callable[[Timeline], None]] = []
        self.token_gap_listeners: list[Callable[[float], None]] = []
        """Called with the seconds between two successive outputs of a request."""
        self.counts_steps = True
        self._open_timelines: dict[str, Timeline] = {}
        self._ended_timelines: dict[str, Timeline] = {}
        self._ended_ids: deque[str] = deque()
        self._timelines_with_steps: deque[Timeline] = deque()
        self._num_steps = 0
        self._engine_numbers = [*range(replicas)]
        self._last_request_ids: list[tuple[str, ...]] = [()] * replicas

    @property
    def num_replicas(self) -> int:
        return len(self._engine_numbers)

    def response_timelines(self, response_id: str) -> list[Timeline]:
        return [
            each
            for each in [*self._open_timelines.values(), *self._ended_timelines.values()]
            if each.id.startswith(f"{response_id}-")
        ]

    def find_timeline(self, request_id: str) -> Timeline | None:
        return self._open_timelines.get(request_id) or self._ended_timelines.get(request_id)

    @property
    def open_timelines(self) -> list[Timeline]:
        return list(self._open_timelines.values())

    @property
    def ended_timelines(self) -> list[Timeline]:
        return [self._ended_timelines[request_id] for request_id in self._ended_ids]

    def record_submission(self, request: EngineCoreRequest) -> None:
        now = self._clock()
        timeline = Timeline(request.id, len(request.prompt_ids), now, [(now, "queued")])
        timeline.image_tokens = sum(span.count for span in request.spans)
        self._open_timelines[request.id] = timeline

    def record_step(self, outputs: Sequence[EngineCoreOutput], record: StepRecord | None, replica: int = 0) -> None:
        if record is not None:
            self._apply_step(outputs, record, replica)
        for output in outputs:
            if output.finish_reason is not None:
                self.end_request(output.id, output.finish_reason)

    def _apply_step(self, outputs: Sequence[EngineCoreOutput], record: StepRecord, replica: int) -> None:
        request_ids = [output.id for output in outputs if output.new_ids]
        if record.chunks:
            request_ids = list(dict.fromkeys([*(request_id for request_id, _, _ in record.chunks), *request_ids]))
        timelines = [self._open_timelines.get(request_id) for request_id in request_ids]
        # Use the timelines' id objects instead of the message's, because identical objects compare faster.
        known_ids = [
            request_id if timeline is None else timeline.id
            for request_id, timeline in zip(request_ids, timelines, strict=True)
        ]
        step = self._make_step_entry(tuple(known_ids), record, replica)
        self._apply_preemptions_and_loads(record)
        self._apply_chunks(step)
        for timeline in timelines:
            if timeline is not None:
                timeline.append_step(step)
        drafts = dict(record.drafts)
        for output in outputs:
            timeline = self._open_timelines.get(output.id)
            if timeline is not None:
                self._apply_output(timeline, output, record.applied_at, drafts.get(output.id, ()))
        for listener in self.listeners:
            listener(step)

    def _make_step_entry(self, request_ids: tuple[str, ...], record: StepRecord, replica: int) -> StepEntry:
        # Successive steps have mostly the same requests, so they share one tuple.
        if request_ids != self._last_request_ids[replica]:
            self._last_request_ids[replica] = request_ids
        return StepEntry(
            record, self._engine_numbers[replica], self._last_request_ids[replica], replica, self.counts_steps
        )

    def _apply_preemptions_and_loads(self, record: StepRecord) -> None:
        for request_id in record.preempted_ids:
            timeline = self._open_timelines.get(request_id)
            if timeline is not None:
                timeline.enter_phase("preempted", record.began_at)
        for request_id, tier, tokens, began, ended in record.tier_loads:
            timeline = self._open_timelines.get(request_id)
            if timeline is not None:
                timeline.tier_loads.append((tier, tokens, began, ended))

    def _apply_chunks(self, step: StepEntry) -> None:
        for request_id, start, count in step.record.chunks:
            timeline = self._open_timelines.get(request_id)
            if timeline is not None:
                timeline.chunks.append((step, start, count))
                timeline.enter_phase("prefill" if timeline.output_tokens == 0 else "recompute", step.record.began_at)

    def _apply_output(
        self, timeline: Timeline, output: EngineCoreOutput, applied_at: float, draft_sources: Sequence[int]
    ) -> None:
        if output.vector is not None:
            timeline.cached_tokens = output.cached_tokens
            timeline.enter_phase("delivery", applied_at)
        if not output.new_ids:
            return
        timeline.count_step_tokens(len(output.new_ids), draft_sources)
        if timeline.cached_tokens is None:
            timeline.cached_tokens = output.cached_tokens
            timeline.prefix_report = output.prefix
            timeline.first_token_at = applied_at
        if timeline.last_token_at:
            for gap_listener in self.token_gap_listeners:
                gap_listener(applied_at - timeline.last_token_at)
        timeline.last_token_at = applied_at
        timeline.enter_phase("decode", applied_at)
        if output.finish_reason is not None:
            timeline.enter_phase("delivery", applied_at)

    def record_engine_death(
        self, replica: int = 0, ids: Iterable[str] | None = None, *, for_good: bool = False
    ) -> None:
        self._engine_numbers[replica] = max(self._engine_numbers) + 1
        now = self._clock()
        affected = (
            self._open_timelines.values()
            if ids is None
            else [self._open_timelines[each] for each in ids if each in self._open_timelines]
        )
        for timeline in list(affected):
            if for_good:
                self.end_request(timeline.id, "error")
            else:
                timeline.enter_phase("recovering", now)

    def end_request(self, request_id: str, reason: str) -> None:
        timeline = self._open_timelines.pop(request_id, None)
        if timeline is None:
            return
        timeline.mark_ended(reason, self._clock())
        for listener in self.end_listeners:
            listener(timeline)
        if self.max_ended:
            self._ended_timelines[request_id] = timeline
            self._ended_ids.append(request_id)
            self._timelines_with_steps.append(timeline)
            self._num_steps += len(timeline.steps)
        while len(self._ended_ids) > self.max_ended:
            del self._ended_timelines[self._ended_ids.popleft()]
        while self._num_steps > MAX_TOTAL_STEPS or len(self._timelines_with_steps) > self.max_ended:
            oldest = self._timelines_with_steps.popleft()
            self._num_steps -= len(oldest.steps)
            oldest.num_dropped_steps += len(oldest.steps)
            oldest.steps, oldest.chunks = [], []
