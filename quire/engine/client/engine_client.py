"""Holds a process's open requests, their outputs so far, and their readers. When an engine core ends, the next engine
core gets the open requests with their tokens. A token depends only on its own request, so streams continue unchanged.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from quire.engine.client.engine_core_client import EngineCoreClient
from quire.engine.client.output_stream import OutputStream, Reader
from quire.engine.client.request_history import RequestHistory, RequestRecorder
from quire.engine.common import clock
from quire.engine.common.errors import EngineError, QuireError, SlowReader
from quire.engine.common.types import Adapter, EngineCoreOutput, EngineCoreRequest
from quire.engine.core.stats import EngineView, StepRecord
from quire.engine.prefix_misses.miss_tracker import PrefixMissTracker
from quire.engine.prefix_misses.recent_turns import LastSessionTurns

log = logging.getLogger("quire.client")


PersistTokens = Callable[[Sequence[int]], None]
"""Stores tokens before readers get them. There are three numbers for each token: its request's number in the log, its
index in the answer, and its id.
"""


@dataclass(eq=False, slots=True)
class Call:
    """An API call submits requests one after another, so it may have no open request."""

    id: str
    tenant: str
    cancelled: bool = False


@dataclass(slots=True)
class _Entry:
    request: EngineCoreRequest
    reader: Reader
    emitted: list[int]
    number: int = 0
    """0 if the request is not durable."""
    cached_tokens: int | None = None
    """None before the first output. Clients get the first engine's number even if a replay finds another number of
    cached tokens.
    """


class EngineClient:
    """Call all methods from the same event loop."""

    def __init__(self, engine_core: EngineCoreClient) -> None:
        self.engine_core = engine_core
        engine_core.owner = self
        self.slow_readers = 0
        """Number of answers aborted because nobody read their tokens in time."""
        self.refusing = False
        self.failure: QuireError | None = None
        """The error that new requests raise."""
        self.history = RequestHistory(replicas=len(engine_core.engines))
        self.recorder: RequestRecorder = self.history
        self.turns: LastSessionTurns | None = LastSessionTurns()
        """None if another process records the sessions' last turns."""
        self._misses = None if engine_core.explains_prefixes else PrefixMissTracker(len(engine_core.engines))
        self._open: dict[str, _Entry] = {}
        self._open_by_tenant: Counter[str] = Counter()
        self._queued_tokens = 0
        self._elsewhere: Counter[str] = Counter()
        """Number of open requests in other API processes, by tenant."""
        self._queued_elsewhere = 0
        self._calls: set[Call] = set()
        self._due: list[Callable[[], None]] = []
        """Callbacks that run at the end of this iteration of the event loop."""
        self._held: dict[str, EngineCoreRequest] | None = None
        """Requests not yet sent to the engine, between `hold` and `release`; None at other times."""
        self._snapshot: asyncio.Task[EngineView | None] | None = None
        self._persist_tokens: PersistTokens = _nowhere
        self._rows: list[int] = []

    @property
    def alive(self) -> bool:
        return self.failure is None

    @property
    def responsive(self) -> bool:
        return self.alive and self.engine_core.responsive

    @property
    def healthy(self) -> bool:
        return self.alive and self.engine_core.healthy

    @property
    def num_open(self) -> int:
        return len(self._open) + self._elsewhere.total()

    @property
    def queued_tokens(self) -> int:
        return self._queued_tokens + self._queued_elsewhere

    @property
    def open_by_tenant(self) -> Mapping[str, int]:
        return self._open_by_tenant

    @property
    def open_everywhere(self) -> Mapping[str, int]:
        return self._open_by_tenant + self._elsewhere if self._elsewhere else self._open_by_tenant

    def num_open_of(self, tenant: str) -> int:
        return self._open_by_tenant[tenant] + self._elsewhere[tenant]

    def adapters(self, *, queued: bool) -> list[Adapter]:
        """Adapters of open requests without output (`queued` True) or with output (False)."""
        return [
            each.request.adapter
            for each in self._open.values()
            if each.request.adapter is not None and (each.cached_tokens is None) == queued
        ]

    # Methods for readers

    def submit(
        self, requests: Sequence[EngineCoreRequest], call: str = "", emitted: Sequence[list[int]] | None = None
    ) -> OutputStream:
        """Submits requests of one tenant, with new ids. If `requests` is empty, the stream ends at once. `emitted` has
        each request's tokens so far, and new tokens are appended to its lists. Raises `failure` if it is set.
        """
        ids = [request.id for request in requests]
        tenant = requests[0].tenant if requests else ""
        stream = OutputStream(self.abort, ids, tenant, call, self.engine_core.weights_version)
        if requests:
            self.add(requests, stream, emitted)
        return stream

    def add(
        self, requests: Sequence[EngineCoreRequest], reader: Reader, emitted: Sequence[list[int]] | None = None
    ) -> None:
        if self.failure is not None:
            raise self.failure
        emitted = [[*request.emitted_ids] for request in requests] if emitted is None else emitted
        for request, ids in zip(requests, emitted, strict=True):
            assert request.id not in self._open, f"request id {request.id} is in use"
            self._open[request.id] = _Entry(request, reader, ids)
            self._queued_tokens += len(request.prompt_ids)
            self.recorder.record_submission(request)
        if self._misses is not None:
            self._misses.add_requests(requests)
        self._open_by_tenant[reader.tenant] += len(requests)
        if self._held is None:
            self.engine_core.send(requests)
        else:
            self._held |= {request.id: request for request in requests}

    def keep(self, request_id: str, number: int, persist_tokens: PersistTokens) -> None:
        """Logs the tokens of an open request, except those of its last output, through `persist_tokens`. All requests
        share one log.
        """
        if (entry := self._open.get(request_id)) is not None:
            entry.number, self._persist_tokens = number, persist_tokens

    def abort(self, request_id: str, reason: str = "abort") -> None:
        if self._close(request_id):
            self.recorder.end_request(request_id, reason)
            self._withdraw(request_id)

    def begin_call(self, id: str, tenant: str) -> Call:
        """Until `end_call`, `cancel` finds the call even while it has no open request."""
        call = Call(id, tenant)
        self._calls.add(call)
        return call

    def end_call(self, call: Call) -> None:
        self._calls.discard(call)

    def age(self, request_id: str) -> float:
        """In seconds; 0 if the request is not open."""
        entry = self._open.get(request_id)
        return 0.0 if entry is None else clock.monotonic() - entry.reader.submitted_at

    def reset_prefix_cache(self) -> None:
        self.engine_core.reset_prefix_cache()
        if self._misses is not None:
            for engine in range(len(self.engine_core.engines)):
                self._misses.record_cache_reset(engine)

    def snapshot(self) -> asyncio.Task[EngineView | None]:
        """Concurrent callers get the same task."""
        if self._snapshot is None or self._snapshot.done():
            self._snapshot = asyncio.create_task(self.engine_core.snapshot())
        return self._snapshot

    # Methods for callers other than readers

    def cancel(self, request_id: str, tenant: str | None = None) -> int:
        """Ends a request, or all requests of a call; the reader gets finish_reason "abort". If `tenant` is None, any
        tenant matches. Returns how many requests ended or, if none was open, how many calls matched.
        """
        calls = [call for call in self._calls if call.id == request_id and tenant in (None, call.tenant)]
        for call in calls:
            call.cancelled = True
        request_ids = [
            each
            for each, entry in self._open.items()
            if request_id in (each, entry.reader.call) and tenant in (None, entry.reader.tenant)
        ]
        self._end(request_ids)
        return len(request_ids) or len(calls)

    def abort_all(self) -> None:
        self._end(list(self._open))

    def end_all(self, error: QuireError) -> None:
        """Readers get the pending outputs, then `error`."""
        for request_id in list(self._open):
            self.give_up(request_id, error)

    def retire(self, error: QuireError) -> None:
        """Later requests raise `error`, too."""
        self.end_all(error)
        self.failure = self.failure or error

    def drop(self, reader_is: Callable[[Reader], bool]) -> int:
        request_ids = [each for each, entry in self._open.items() if reader_is(entry.reader)]
        for request_id in request_ids:
            self.abort(request_id)
        return len(request_ids)

    def hold(self) -> None:
        self._held = {}

    def release(self) -> None:
        held, self._held = self._held, None
        if held and self.failure is None:
            self.engine_core.send(list(held.values()))

    @property
    def has_unheld(self) -> bool:
        return len(self._open) > len(self._held or ())

    # Methods of RequestOwner

    def request(self, request_id: str) -> EngineCoreRequest:
        entry = self._open[request_id]
        return msgspec.structs.replace(entry.request, emitted_ids=[*entry.emitted])

    def deliver(self, outputs: Sequence[EngineCoreOutput], step: StepRecord | None = None, engine: int = 0) -> None:
        if self._misses is not None and step is not None and step.chunks:
            self._misses.track_step(
                step, engine, self.engine_core.engines[engine].stats, self.engine_core.weights_version
            )
        outputs = [self._with_first_cached_tokens(output) for output in outputs]
        if self._rows:
            rows, self._rows = self._rows, []
            self._persist_tokens(rows)
        self.recorder.record_step(outputs, step, engine)
        version = self.engine_core.weights_version
        for output in outputs:
            entry = self._open.get(output.id)
            if entry is None:
                continue
            if output.finish_reason is not None:
                self._close(output.id)
            try:
                later = entry.reader.push(output, version)
            except SlowReader as error:
                self.slow_readers += 1
                self._give_up(entry.reader, error)
                continue
            if later is not None:
                if not self._due:
                    asyncio.get_running_loop().call_soon(self._end_turn)
                self._due.append(later)

    def _with_first_cached_tokens(self, output: EngineCoreOutput) -> EngineCoreOutput:
        entry = self._open.get(output.id)
        if entry is None:
            return output
        if entry.number and output.finish_reason is None:
            for id in output.new_ids:
                self._rows += (entry.number, len(entry.emitted), id)
                entry.emitted.append(id)
        else:
            entry.emitted += output.new_ids
        if entry.cached_tokens is None:
            entry.cached_tokens = output.cached_tokens
            self._queued_tokens -= len(entry.request.prompt_ids)
            if self._misses is not None and (report := self._misses.get_request_report(output.id)) is not None:
                return msgspec.structs.replace(output, prefix=report)
        elif entry.cached_tokens != output.cached_tokens:
            return msgspec.structs.replace(output, cached_tokens=entry.cached_tokens)
        return output

    def _end_turn(self) -> None:
        """Runs due callbacks together, because one event-loop callback costs less than one for each stream."""
        due, self._due = self._due, []
        for hand_on in due:
            try:
                hand_on()
            except Exception:
                log.exception("a stream failed")

    def handle_engine_loss(self, engine: int = 0, ids: Iterable[str] | None = None) -> None:
        """`ids`: the requests that the engine had; None means all open requests."""
        ids = None if ids is None else list(ids)
        if self._misses is not None:
            self._misses.record_engine_loss(engine, ids)
        self.recorder.record_engine_death(engine, ids)

    def handle_engine_change(self, engine: int = 0) -> None:
        """Does nothing: a single engine's client itself queues requests that the engine cannot accept yet."""

    def give_up(self, request_id: str, error: QuireError) -> None:
        """Ends all requests of this request's call. The reader gets the pending outputs, then `error`."""
        if (entry := self._open.get(request_id)) is not None:
            self._give_up(entry.reader, error)

    def fail(self, error: EngineError, engine: int = 0) -> None:
        """The engine is gone for good."""
        if self.failure is None:
            self.failure = error
            self.recorder.record_engine_death(for_good=True)
            readers = dict.fromkeys(entry.reader for entry in self._open.values())
            for request_id in list(self._open):
                self._close(request_id)
            for reader in readers:
                reader.fail(error)

    def share(self, open_by_tenant: Mapping[str, int], queued_tokens: int) -> None:
        """`open_by_tenant` counts the open requests of all API processes, except messages in flight."""
        self._elsewhere = Counter(open_by_tenant) - self._open_by_tenant
        self._queued_elsewhere = max(0, queued_tokens - self._queued_tokens)

    def _give_up(self, reader: Reader, error: QuireError) -> None:
        for request_id in reader.ids:
            self.abort(request_id)
        reader.fail(error)

    def _end(self, ids: Sequence[str]) -> None:
        self.deliver([EngineCoreOutput(each, [], finish_reason="abort") for each in ids])
        for each in ids:
            self._withdraw(each)

    def _withdraw(self, request_id: str) -> None:
        if self.failure is None and (self._held is None or self._held.pop(request_id, None) is None):
            self.engine_core.abort(request_id)

    def _close(self, request_id: str) -> bool:
        entry = self._open.pop(request_id, None)
        if entry is None:
            return False
        if self._misses is not None or self.turns is not None:
            before = len(entry.request.emitted_ids)
            new = entry.emitted[before:] if before else entry.emitted
            if self._misses is not None:
                self._misses.finish_request(request_id, new)
            if self.turns is not None and entry.request.session:
                self.turns.record_turn(entry.request, new)
        if entry.cached_tokens is None:
            self._queued_tokens -= len(entry.request.prompt_ids)
        tenant = entry.reader.tenant
        self._open_by_tenant[tenant] -= 1
        if not self._open_by_tenant[tenant]:
            del self._open_by_tenant[tenant]  # gateways may send new tenant names without end
        return True


def _nowhere(rows: Sequence[int]) -> None: ...
