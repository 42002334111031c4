"""How the server reaches an engine: one interface, two bodies (in this process, in a process of its own)."""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Sequence
from time import monotonic

import msgspec

from quire.engine.client.history import History
from quire.engine.errors import EngineError, QuireError, SlowReader
from quire.engine.types import EngineInfo, EngineSnapshot, EngineStats, Request, RequestOutput, StepRecord

log = logging.getLogger("quire.client")

MAX_BACKLOG = 2**18
"""Tokens that a stream keeps for a reader, each with the alternatives reported beside it: some 20 MB."""


class OutputStream:
    """The outputs of a group of requests (the n choices of one call), in the order they come.

    Iterating gives, each time, a list with at most one RequestOutput per request: what arrived since the last time,
    merged, so a slow reader gets fewer and larger pieces. It ends when every request of the group has ended, and raises
    EngineError when the engine is gone, SlowReader when more than MAX_BACKLOG waited to be read. Call `close()` when
    done: what still runs is aborted.
    """

    def __init__(self, client: EngineClient, ids: Iterable[str], tenant: str, call: str = "") -> None:
        self.tenant = tenant
        self.call = call
        self.began = monotonic()
        self._client = client
        self._open = set(ids)
        self._pending: dict[str, RequestOutput] = {}
        self._backlog = 0
        self._error: QuireError | None = None
        self._reader: asyncio.Future[None] | None = None
        """Whom the next output wakes. Cheaper than an asyncio.Event."""

    def __aiter__(self) -> OutputStream:
        return self

    async def __anext__(self) -> list[RequestOutput]:
        # Woken by an abort too, which may leave others running.
        while self._open and not self._pending and self._error is None:
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        if self._pending:
            outputs = list(self._pending.values())
            self._pending.clear()
            self._backlog = 0
            return outputs
        if self._error is not None:
            raise self._error
        raise StopAsyncIteration

    def push(self, output: RequestOutput) -> None:
        """Called by the client."""
        if output.id not in self._open:
            return
        before = self._pending.get(output.id)
        self._pending[output.id] = output if before is None else merge(before, output)
        if output.finish_reason is not None:
            self._open.discard(output.id)
        self._backlog += len(output.new_ids) * (1 + (len(output.logprobs[0].top) if output.logprobs else 0))
        if self._backlog > MAX_BACKLOG:
            log.warning("request %s: %d tokens wait for a reader, and the answer is given up", output.id, self._backlog)
            self._client.slow_readers += 1
            self.give_up(SlowReader("the answer was not read in time, and was given up"))
        self._wake()

    def fail(self, error: QuireError) -> None:
        """Called by the client: no output will come any more."""
        self._open.clear()
        self._error = error
        self._wake()

    def abort(self, request_id: str, reason: str = "abort") -> None:
        """End one request of the group now; nothing more is heard of it. `reason` is for its history."""
        if request_id in self._open:
            self._open.discard(request_id)
            self._client.forget(request_id, reason)
            self._wake()

    def give_up(self, error: QuireError) -> bool:
        """Abort what still runs and raise `error` after what has come; False, and nothing, when all has ended."""
        if not self._open:
            return False
        self.close()
        self.fail(error)
        return True

    def close(self) -> None:
        for request_id in list(self._open):
            self.abort(request_id)

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)


def merge(first: RequestOutput, second: RequestOutput) -> RequestOutput:
    """Two outputs of one request, in order, as one."""
    asked = first.logprobs is not None or second.logprobs is not None
    return msgspec.structs.replace(
        second,
        new_ids=first.new_ids + second.new_ids,
        logprobs=(first.logprobs or []) + (second.logprobs or []) if asked else None,
        prompt_logprobs=first.prompt_logprobs if second.prompt_logprobs is None else second.prompt_logprobs,
        cached_tokens=max(first.cached_tokens, second.cached_tokens),
    )


class EngineClient(ABC):
    """Submits requests and hands out their outputs. All methods are called from one event loop."""

    def __init__(self) -> None:
        self.stats = EngineStats()
        self.deaths = 0
        """Engines that died under way."""
        self.replays = 0
        """Requests submitted again after a death, each time counted."""
        self.quarantined = 0
        """Requests given up because they end every engine."""
        self.slow_readers = 0
        """Answers given up because nobody read them."""
        self.queued_tokens = 0
        """Prompt tokens of open requests that no output has come of yet."""
        self._queued: dict[str, int] = {}
        self._open_of: Counter[str] = Counter()
        self.history = History()
        self._streams: dict[str, OutputStream] = {}
        self._dead: QuireError | None = None
        self._snapshot: asyncio.Future[EngineSnapshot] | None = None

    @abstractmethod
    async def start(self) -> EngineInfo:
        """Start the engine and wait until it is ready. Raises ConfigError or EngineError with its last words."""

    @abstractmethod
    async def stop(self) -> None:
        """End the engine; open streams fail with EngineError."""

    @abstractmethod
    def _send(self, requests: Sequence[Request]) -> None: ...

    @abstractmethod
    def _send_abort(self, request_id: str) -> None: ...

    @abstractmethod
    def _send_snapshot_request(self) -> None: ...

    @property
    def alive(self) -> bool:
        return self._dead is None

    @property
    def responsive(self) -> bool:
        """Whether the engine would answer now; false while a dead one is being replaced."""
        return self.alive

    @property
    def num_open(self) -> int:
        return len(self._streams)

    def num_open_of(self, tenant: str) -> int:
        return self._open_of[tenant]

    def submit(self, requests: Sequence[Request], call: str = "") -> OutputStream:
        """Submit a group, of one tenant; ids must be new. `call` names what they are for.

        Raises EngineError when the engine is gone.
        """
        if self._dead is not None:
            raise self._dead
        stream = OutputStream(self, [request.id for request in requests], requests[0].tenant, call)
        for request in requests:
            assert request.id not in self._streams, f"request id {request.id} is in use"
            self._streams[request.id] = stream
            self._queued[request.id] = len(request.prompt_ids)
            self.queued_tokens += len(request.prompt_ids)
            self.history.submitted(request)
        self._open_of[stream.tenant] += len(requests)
        self._send(requests)
        return stream

    def forget(self, request_id: str, reason: str = "abort") -> None:
        """Abort a request and drop its outputs. Called by its stream."""
        if self._close(request_id):
            self.history.end(request_id, reason)
            if self._dead is None:
                self._send_abort(request_id)

    def _close(self, request_id: str) -> bool:
        """It is open no more; whether it was."""
        stream = self._streams.pop(request_id, None)
        if stream is None:
            return False
        self.queued_tokens -= self._queued.pop(request_id, 0)
        self._open_of[stream.tenant] -= 1
        return True

    def cancel(self, request_id: str, tenant: str | None = None) -> int:
        """End a request, or all those of a call, for somebody else: its reader sees finish_reason abort. How many.

        With a tenant, only if they are its own.
        """
        found = [
            each
            for each, stream in self._streams.items()
            if request_id in (each, stream.call) and tenant in (None, stream.tenant)
        ]
        self._deliver([RequestOutput(each, [], finish_reason="abort") for each in found], self.stats)
        for each in found:
            self._send_abort(each)
        return len(found)

    def age(self, request_id: str) -> float:
        """Seconds since an open request was submitted; 0 when it is not open."""
        stream = self._streams.get(request_id)
        return 0.0 if stream is None else monotonic() - stream.began

    def snapshot(self) -> asyncio.Future[EngineSnapshot]:
        """What the engine has in hand after its current step. Ask while it is responsive; cancelled if it dies."""
        pending = self._snapshot
        if pending is None:
            pending = self._snapshot = asyncio.get_running_loop().create_future()
            self._send_snapshot_request()  # the answer may be there at once
        return pending

    def _on_snapshot(self, view: EngineSnapshot | None) -> None:
        """None: the engine that was asked is gone."""
        pending, self._snapshot = self._snapshot, None
        if pending is None or pending.done():
            return
        if view is None:
            pending.cancel()
        else:
            pending.set_result(view)

    def end_all(self, error: QuireError) -> None:
        """Abort all that is open; the streams raise `error` after what has come."""
        for stream in {id(stream): stream for stream in self._streams.values()}.values():
            stream.give_up(error)

    def _deliver(self, outputs: Sequence[RequestOutput], stats: EngineStats, step: StepRecord | None = None) -> None:
        self.stats = stats
        self.history.stepped(outputs, step)
        for output in outputs:
            stream = self._streams.get(output.id)
            if stream is None:
                continue
            self.queued_tokens -= self._queued.pop(output.id, 0)
            if output.finish_reason is not None:
                self._close(output.id)
            stream.push(output)

    def _fail(self, message: str) -> None:
        """The engine is gone: every open stream ends with an error."""
        if self._dead is None:
            self._dead = EngineError(message)
            self.history.engine_died(for_good=True)
            streams = {id(stream): stream for stream in self._streams.values()}
            for request_id in list(self._streams):
                self._close(request_id)
            self._on_snapshot(None)
            for stream in streams.values():
                stream.fail(self._dead)
