"""What happened to each request and in each step: recorded by the engine, kept by whoever holds its client.

The engine sends a step's record with the step's outputs. All requests of the step share the record, so a token costs
one reference. The history outlives engines and is bounded: it keeps the requests that ended last, and a limited number
of steps of each.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import msgspec

from quire.engine import clock
from quire.engine.core.scheduler_output import SchedulerOutput
from quire.engine.core.stats import Phase, StepRecord
from quire.engine.types import EngineCoreOutput, EngineCoreRequest, PrefixReport

TimelinePhase = Phase | Literal["recompute", "recovering", "delivery"]
"""The scheduler's phases, and three that only the client knows: prefill again after a preemption or a new engine,
waiting for a new engine after a crash, a sleep or a change of weights, and waiting for the last output to arrive."""
KEPT_REQUESTS = 1000
KEPT_STEPS = 2000
"""Per request; later steps are only counted."""
KEPT_IN_ALL = 100_000
"""Steps of all ended requests together, at most some 500 bytes each. Beyond that the requests that ended first lose
their steps and keep their phases."""


def step_record(
    batch: SchedulerOutput, number: int, times: tuple[float, float, float, float], *, captured: bool = False
) -> StepRecord:
    """The record of one step of the engine. captured: a CUDA graph computed it.

    `times` are those of time.monotonic() at which the step began, was scheduled, was computed and was applied.
    """
    admitted = {admission.slot for admission in batch.new_requests}
    chunks = tuple(
        (row.request_id, row.start, row.num_tokens)
        for row in batch.scheduled_requests
        if row.num_tokens - len(row.draft_token_ids) > 1 or not row.sample or row.slot in admitted
    )
    tokens = sum(row.num_tokens for row in batch.scheduled_requests)
    drafts = tuple(
        (row.request_id, len(row.draft_token_ids)) for row in batch.scheduled_requests if row.draft_token_ids
    )
    fetched = tuple((each.request_id, each.tier, each.tokens, each.began, each.ended) for each in batch.loaded_blocks)
    told = tuple(batch.preempted_ids), fetched, drafts, tuple(batch.adapter_loads)
    return StepRecord(number, *times, len(batch.scheduled_requests), tokens, chunks, *told, captured=captured)


class Step(msgspec.Struct, frozen=True, gc=False):
    """A step, and the requests that took part in it."""

    record: StepRecord
    engine: int
    """Number of the engine process, from 0; each that comes after a crash has the next one."""
    ids: tuple[str, ...]
    replica: int = 0
    """Which of the engines that work beside each other it was."""
    counts: bool = True
    """False where another API process of this server counts it."""


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
    fetched: list[tuple[str, int, float, float]] = field(default_factory=list)
    """(tier, tokens, began, ended) of what came back from tiers of KV pages."""
    image_tokens: int = 0
    """Those of the prompt's tokens that stand for images."""
    cached_tokens: int | None = None
    prefix: PrefixReport | None = None
    """What else of its prompt could have been cached; None where nothing is known."""
    output_tokens: int = 0
    draft_tokens: int = 0
    """Guessed tokens that were computed for it."""
    accepted_tokens: int = 0
    """Those of them that were right."""
    first_token: float | None = None
    last_token: float = 0.0
    """When the last step ended that gave it tokens; 0: none did."""
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


class Recorder(Protocol):
    """Is told what happens to the requests of a book."""

    def submitted(self, request: EngineCoreRequest) -> None: ...

    def stepped(self, outputs: Sequence[EngineCoreOutput], record: StepRecord | None, replica: int = 0) -> None:
        """Outputs came, of a step; without a record they come from adding or aborting requests."""

    def engine_died(self, replica: int = 0, ids: Iterable[str] | None = None, *, for_good: bool = False) -> None:
        """Its requests, all that are open or these, wait for another engine; with `for_good` they end with this one."""

    def end(self, request_id: str, reason: str) -> None:
        """End a request. Does nothing when it is not open."""


class History:
    """Timelines of open requests and of those that ended last."""

    def __init__(
        self, keep: int = KEPT_REQUESTS, replicas: int = 1, clock: Callable[[], float] = lambda: clock.monotonic()
    ) -> None:
        self._clock = clock
        self.keep = keep
        """How many ended requests to remember."""
        self.listeners: list[Callable[[Step], None]] = []
        """Called with every step."""
        self.end_listeners: list[Callable[[Timeline], None]] = []
        """Called with every request that has ended."""
        self.gap_listeners: list[Callable[[float], None]] = []
        """Called with the seconds from each step that gave a request tokens to the next one that did."""
        self.counts = True
        """`Step.counts` of the next step."""
        self._open: dict[str, Timeline] = {}
        self._ended: dict[str, Timeline] = {}
        self._order: deque[str] = deque()
        self._detailed: deque[Timeline] = deque()
        self._kept_steps = 0
        self._engines = [*range(replicas)]
        """By replica: the number of its engine process."""
        self._last_ids: list[tuple[str, ...]] = [()] * replicas
        """By replica: of its last step."""

    @property
    def replicas(self) -> int:
        """How many engines work beside each other."""
        return len(self._engines)

    def of(self, job: str) -> list[Timeline]:
        """The timelines of one answer's sequences, whose ids begin with the answer's id `job`."""
        return [each for each in [*self._open.values(), *self._ended.values()] if each.id.startswith(f"{job}-")]

    def find(self, request_id: str) -> Timeline | None:
        """The timeline of a request that is open or ended lately."""
        return self._open.get(request_id) or self._ended.get(request_id)

    @property
    def open(self) -> list[Timeline]:
        return list(self._open.values())

    @property
    def ended(self) -> list[Timeline]:
        """Timelines of ended requests; the one that ended last comes last."""
        return [self._ended[request_id] for request_id in self._order]

    def submitted(self, request: EngineCoreRequest) -> None:
        now = self._clock()
        timeline = Timeline(request.id, len(request.prompt_ids), now, [(now, "queued")])
        timeline.image_tokens = sum(span.count for span in request.spans)
        self._open[request.id] = timeline

    def stepped(self, outputs: Sequence[EngineCoreOutput], record: StepRecord | None, replica: int = 0) -> None:
        """See Recorder."""
        if record is not None:
            self._take(outputs, record, replica)
        for output in outputs:
            if output.finish_reason is not None:
                self.end(output.id, output.finish_reason)

    def _take(self, outputs: Sequence[EngineCoreOutput], record: StepRecord, replica: int) -> None:
        named = [output.id for output in outputs if output.new_ids]
        if record.chunks:
            named = list(dict.fromkeys([*(request_id for request_id, _, _ in record.chunks), *named]))
        timelines = [self._open.get(request_id) for request_id in named]
        # The ids that are kept, not those that came with the message, are compared: they are the same objects.
        ids = tuple([each if of is None else of.id for each, of in zip(named, timelines, strict=True)])
        if ids != self._last_ids[replica]:  # steps in a row mostly have the same requests, and share a tuple of them
            self._last_ids[replica] = ids
        step = Step(record, self._engines[replica], self._last_ids[replica], replica, self.counts)
        for request_id in record.preempted:
            if (timeline := self._open.get(request_id)) is not None:
                timeline.enter("preempted", record.began)
        for request_id, tier, tokens, began, ended in record.fetched:
            if (timeline := self._open.get(request_id)) is not None:
                timeline.fetched.append((tier, tokens, began, ended))
        for request_id, start, count in record.chunks:
            if (timeline := self._open.get(request_id)) is not None:
                timeline.chunks.append((step, start, count))
                timeline.enter("prefill" if timeline.output_tokens == 0 else "recompute", record.began)
        for timeline in timelines:
            if timeline is not None:
                if len(timeline.steps) < KEPT_STEPS:
                    timeline.steps.append(step)
                else:
                    timeline.more_steps += 1
        drafts = dict(record.drafts)
        for output in outputs:
            if output.vector is not None and (timeline := self._open.get(output.id)) is not None:
                timeline.cached_tokens = output.cached_tokens
                timeline.enter("delivery", record.ended)
            if output.new_ids and (timeline := self._open.get(output.id)) is not None:
                timeline.output_tokens += len(output.new_ids)
                if drafted := drafts.get(output.id):
                    timeline.draft_tokens += drafted
                    timeline.accepted_tokens += len(output.new_ids) - 1
                if timeline.cached_tokens is None:
                    timeline.cached_tokens, timeline.prefix = output.cached_tokens, output.prefix
                    timeline.first_token = record.ended
                if timeline.last_token:
                    for told in self.gap_listeners:
                        told(record.ended - timeline.last_token)
                timeline.last_token = record.ended
                if timeline.marks[-1][1] != "decode":
                    timeline.enter("decode", record.ended)
                if output.finish_reason is not None:
                    timeline.enter("delivery", record.ended)
        for listener in self.listeners:
            listener(step)

    def engine_died(self, replica: int = 0, ids: Iterable[str] | None = None, *, for_good: bool = False) -> None:
        """See Recorder."""
        self._engines[replica] = max(self._engines) + 1
        now = self._clock()
        had = self._open.values() if ids is None else [self._open[each] for each in ids if each in self._open]
        for timeline in list(had):
            if for_good:
                self.end(timeline.id, "error")
            else:
                timeline.enter("recovering", now)

    def end(self, request_id: str, reason: str) -> None:
        """See Recorder."""
        timeline = self._open.pop(request_id, None)
        if timeline is None:
            return
        timeline.end(reason, self._clock())
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
