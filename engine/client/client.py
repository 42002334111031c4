"""The interface through which the server uses an engine: submit requests, read their outputs, abort them.

Four classes implement it: InProcessClient (engine/offline/in_process.py) runs the engine in this process, ProcessClient
(supervisor.py) in one of its own, Replicas (engine/replicas/replicas.py) several; RemoteClient (engine/hub) shares one.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from time import monotonic

from quire.engine.client.history import History
from quire.engine.client.output_stream import OutputStream
from quire.engine.errors import EngineError, QuireError
from quire.engine.stats import EngineSnapshot, EngineStats, StepRecord
from quire.engine.types import Adapter, EngineInfo, Request, RequestOutput

log = logging.getLogger("quire.client")


@dataclass(eq=False, slots=True)
class Call:
    """An API call that submits requests one after another, and has none open at times."""

    id: str
    tenant: str
    cancelled: bool = False


class EngineClient(ABC):
    """Submits requests and hands out their outputs. All methods must be called from the same event loop."""

    def __init__(self) -> None:
        self.stats = EngineStats()
        self.deaths = 0
        """Engine processes that ended without having been stopped."""
        self.replays = 0
        """Requests submitted again after an engine ended; one that is replayed twice counts twice."""
        self.quarantined = 0
        """Requests given up because they ended each engine that they were tried on."""
        self.slow_readers = 0
        """Answers given up because nobody read them."""
        self.queued_tokens = 0
        """Prompt tokens of the open requests that have given no output yet."""
        self._queued: dict[str, int] = {}
        """The same by request."""
        self._open_by_tenant: Counter[str] = Counter()
        self.history = History()
        self._streams: dict[str, OutputStream] = {}
        """By id of an open request."""
        self._adapters: dict[str, Adapter] = {}
        """By id of an open request that needs one."""
        self._calls: set[Call] = set()
        self._failure: QuireError | None = None
        """Why the engine is gone for good; None while it is not."""
        self._snapshot: asyncio.Future[EngineSnapshot] | None = None
        """The snapshot that was asked for and has not come."""
        self.weights_version = "1"
        """Of the weights that the next token is computed with."""
        self.asleep = False
        """Whether weights and KV cache were let go; requests wait until they are back."""
        self.refusing = False
        """Whether new requests should be refused while it sleeps."""
        self._due: list[OutputStream] = []
        """Streams whose shortcuts will be given what has come; while there are some, `_hand_on` will be called."""
        self._held: dict[str, Request] | None = None
        """New requests that the engine is not told of, while there are to be none."""

    @abstractmethod
    async def start(self) -> EngineInfo:
        """Start the engine and wait until it is ready.

        Raises ConfigError for a configuration that it cannot start with, EngineError when it ends while it starts.
        """

    @abstractmethod
    async def stop(self) -> None:
        """End the engine; open streams fail with EngineError."""

    @abstractmethod
    def _send(self, requests: Sequence[Request]) -> None:
        """Pass new requests on to the engine."""

    @abstractmethod
    def _send_abort(self, request_id: str) -> None:
        """Tell the engine to stop computing a request, if it has it."""

    @abstractmethod
    def _send_snapshot_request(self) -> None:
        """Ask the engine for a snapshot; `_on_snapshot` takes the answer."""

    @abstractmethod
    async def rest(self, level: int) -> None:
        """Let weights and KV cache go: `asleep`. See Weights.sleep, which calls it."""

    @abstractmethod
    async def check(self, weights: str) -> None:
        """Raise ConfigError where `load` would refuse the weights at this path by what their files' headers say. While
        the engine sleeps, nothing is checked."""

    @abstractmethod
    async def load(self, weights: str | None, version: str) -> None:
        """Build the engine anew with the weights at this path, None: with those that it had. See Weights, which calls
        it."""

    @abstractmethod
    def reset_prefix_cache(self) -> None:
        """Let requests that are submitted from now on find no prefix of an earlier one."""

    @property
    def alive(self) -> bool:
        """Whether requests can be submitted; False once the engine is gone for good."""
        return self._failure is None

    @property
    def responsive(self) -> bool:
        """Whether the engine would answer now; False while an ended engine process is being replaced."""
        return self.alive

    @property
    def healthy(self) -> bool:
        """As `responsive`, but true also of an engine that sleeps or changes its weights because it was told to."""
        return self.responsive

    @property
    def engines(self) -> Sequence[EngineClient]:
        """Those that work beside each other, by their number."""
        return [self]

    @property
    def num_open(self) -> int:
        """Number of requests that have not ended."""
        return len(self._streams)

    @property
    def running_adapters(self) -> list[Adapter]:
        """Of the open requests that have given an output, those that need one."""
        return [adapter for each, adapter in self._adapters.items() if each not in self._queued]

    @property
    def waiting_adapters(self) -> list[Adapter]:
        """Of the open requests that have given no output yet."""
        return [adapter for each, adapter in self._adapters.items() if each in self._queued]

    def num_open_of(self, tenant: str) -> int:
        """Number of a tenant's requests that have not ended."""
        return self._open_by_tenant[tenant]

    def submit(self, requests: Sequence[Request], call: str = "", stream: OutputStream | None = None) -> OutputStream:
        """Submit a group of requests, all of one tenant and with new ids, of the API call `call`; maybe for a `stream`.

        Raises EngineError when the engine is gone for good.
        """
        if self._failure is not None:
            raise self._failure
        stream = stream or OutputStream(self, [request.id for request in requests], requests[0].tenant, call)
        for request in requests:
            assert request.id not in self._streams, f"request id {request.id} is in use"
            self._streams[request.id] = stream
            self._queued[request.id] = len(request.prompt_ids)
            self.queued_tokens += len(request.prompt_ids)
            self.history.submitted(request)
            if request.adapter is not None:
                self._adapters[request.id] = request.adapter
        self._open_by_tenant[stream.tenant] += len(requests)
        if self._held is None:
            self._send(requests)
        else:
            self._held |= {request.id: request for request in requests}
        return stream

    def hold(self) -> None:
        """Keep new requests from the engine, until `release`."""
        self._held = {}

    def release(self) -> None:
        held, self._held = self._held, None
        if held and self._failure is None:
            self._send(list(held.values()))

    @property
    def has_unheld(self) -> bool:
        """Whether requests are open that the engine was told of."""
        return len(self._streams) > len(self._held or ())

    def begin_call(self, id: str, tenant: str) -> Call:
        """A call that `cancel` finds, until `end_call`, whether or not it has requests open."""
        call = Call(id, tenant)
        self._calls.add(call)
        return call

    def end_call(self, call: Call) -> None:
        self._calls.discard(call)

    def abort(self, request_id: str, reason: str = "abort") -> None:
        """End a request whose reader wants no more outputs. Called by its stream."""
        if self._remove(request_id):
            self.history.end(request_id, reason)
            if self._failure is None and (self._held is None or self._held.pop(request_id, None) is None):
                self._send_abort(request_id)

    def _remove(self, request_id: str) -> bool:
        """Remove a request from the open ones; returns whether it was open."""
        stream = self._streams.pop(request_id, None)
        if stream is None:
            return False
        self.queued_tokens -= self._queued.pop(request_id, 0)
        self._adapters.pop(request_id, None)
        self._open_by_tenant[stream.tenant] -= 1
        if not self._open_by_tenant[stream.tenant]:
            del self._open_by_tenant[stream.tenant]  # gateways tell tenants' names, ever new ones
        return True

    def cancel(self, request_id: str, tenant: str | None = None) -> int:
        """End a request, or all requests of a call, on behalf of someone who does not read their outputs.

        request_id: the id of a request or of a call. Their readers see finish_reason "abort". With a tenant, only that
        tenant's requests are ended. Returns how many were, or 1 for a call that has none open just now.
        """
        calls = [call for call in self._calls if call.id == request_id and tenant in (None, call.tenant)]
        for call in calls:
            call.cancelled = True
        found = [
            each
            for each, stream in self._streams.items()
            if request_id in (each, stream.call) and tenant in (None, stream.tenant)
        ]
        self._end(found)
        return len(found) or len(calls)

    def abort_all(self) -> None:
        """End all open requests; their readers see finish_reason "abort"."""
        self._end(list(self._streams))

    def _end(self, ids: Sequence[str]) -> None:
        self._deliver([RequestOutput(each, [], finish_reason="abort") for each in ids], self.stats)
        for each in ids:
            if self._held is None or self._held.pop(each, None) is None:
                self._send_abort(each)

    def age(self, request_id: str) -> float:
        """Seconds since an open request was submitted; 0 when it is not open."""
        stream = self._streams.get(request_id)
        return 0.0 if stream is None else monotonic() - stream.submitted_at

    def snapshot(self) -> asyncio.Future[EngineSnapshot]:
        """The requests and pages that the engine has after its current step.

        Call it only while the engine is responsive. The future is cancelled if the engine ends before it answers.
        """
        pending = self._snapshot
        if pending is None:
            pending = self._snapshot = asyncio.get_running_loop().create_future()
            self._send_snapshot_request()  # an engine in this process calls _on_snapshot before this returns
        return pending

    def _on_snapshot(self, snapshot: EngineSnapshot | None) -> None:
        """The engine answered; None: it ended before it could."""
        pending, self._snapshot = self._snapshot, None
        if pending is None or pending.done():
            return
        if snapshot is None:
            pending.cancel()
        else:
            pending.set_result(snapshot)

    def end_all(self, error: QuireError) -> None:
        """Abort all open requests; their readers get `error` after the outputs before it."""
        for stream in self._open_streams():
            stream.give_up(error)

    def retire(self, error: QuireError) -> None:
        """The same, and later requests raise `error`: the engine is about to be stopped."""
        self.end_all(error)
        self._failure = self._failure or error

    def _open_streams(self) -> list[OutputStream]:
        return list(dict.fromkeys(self._streams.values()))

    def _deliver(
        self, outputs: Sequence[RequestOutput], stats: EngineStats, step: StepRecord | None = None, replica: int = 0
    ) -> None:
        """Hand outputs of the engine to the streams of their requests. step: the record of the step they came from."""
        self.stats = stats
        self.history.stepped(outputs, step, replica)
        for output in outputs:
            stream = self._streams.get(output.id)
            if stream is None:
                continue
            if output.id in self._queued:
                self.queued_tokens -= self._queued.pop(output.id)
            if output.finish_reason is not None:
                self._remove(output.id)
            stream.push(output)

    def hand_on_later(self, stream: OutputStream) -> None:
        """Give a stream's shortcut what has come, behind this turn of the event loop. Called by the stream.

        Those of a step follow each other in one callback, which costs a fraction of a wake-up of each reader's task."""
        if not self._due:
            asyncio.get_running_loop().call_soon(self._hand_on)
        self._due.append(stream)

    def _hand_on(self) -> None:
        due, self._due = self._due, []
        for stream in due:
            try:
                stream.hand_on()
            except Exception:
                log.exception("a stream failed")  # which is no reason to lose what is for the others

    def _fail(self, message: str) -> None:
        """The engine is gone for good: every open stream ends with an error. Only the first call counts."""
        if self._failure is None:
            self._failure = EngineError(message)
            self.history.engine_died(for_good=True)
            streams = self._open_streams()
            for request_id in list(self._streams):
                self._remove(request_id)
            self._on_snapshot(None)
            for stream in streams:
                stream.fail(self._failure)
