"""The engine in a process of its own that may die at any moment: a new one goes on where it was.

What was submitted and what came of it is held here, in the API process; after a cause every open request is submitted
again with the tokens it already has, and as a token depends on nothing but its own request, the stream continues as if
nothing had happened.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from quire.engine.client.client import EngineClient
from quire.engine.client.exit_cause import ExitCause
from quire.engine.client.process import EngineProcess
from quire.engine.client.replay import Replay
from quire.engine.config import EngineConfig
from quire.engine.errors import ConfigError, EngineError, RequestQuarantined
from quire.engine.messages import Abort, Failed, Ready, SnapshotRequest, SnapshotTaken, Stepped, Submit
from quire.engine.types import EngineInfo, EngineStats, Request, RequestOutput

log = logging.getLogger("quire.supervisor")

_BACKOFF_SECONDS = (0.0, 0.5, 1.0, 2.0, 5.0)
_COUNTERS = ("preemptions", "prefix_queries", "prefix_hits", "prompt_tokens", "generation_tokens", "steps")


@dataclass(slots=True)
class _JournalEntry:
    """The journal of one request: what was asked, and the tokens that were handed out."""

    request: Request
    emitted: list[int] = field(default_factory=list)
    cached_tokens: int | None = None
    """What the first engine to compute it found cached: a replay finds other things, which are none of the client's."""


class _KilledDuringStart(EngineError):
    """From outside."""


class ProcessClient(EngineClient):
    """`launch()` starts the process and returns at once; `start()` waits until it is ready, and supervises it."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__()
        self._config = config
        self._process: EngineProcess | None = None
        self._ready = False
        self._journal: dict[str, _JournalEntry] = {}
        self._replay = Replay()
        self._earlier = EngineStats()
        self._ended: asyncio.Task[ExitCause] | None = None
        self._task: asyncio.Task[None] | None = None
        self._failures = 0
        """Lives in a row that came to nothing."""

    def launch(self) -> None:
        """Raises EngineError when the system has no room for another process."""
        try:
            self._process = EngineProcess(self._config, self._replay.begin)
        except OSError as error:
            raise EngineError(f"no engine process could be started: {error.strerror}") from error

    @property
    def pid(self) -> int | None:
        """The engine's process id."""
        return None if self._process is None else self._process.pid

    @property
    def responsive(self) -> bool:
        """A sign of life came within the bound, from an engine that is ready."""
        process = self._process
        return self._ready and process is not None and process.silence < self._config.engine_heartbeat_timeout

    async def start(self) -> EngineInfo:
        try:
            info = await self._bring_up(tries=1)
        except BaseException:
            await self.stop()
            raise
        self._task = asyncio.create_task(self._supervise_or_fail())
        return info

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self._ended is not None:
            self._ended.cancel()
            await asyncio.gather(self._ended, return_exceptions=True)
        if self._process is not None:
            process, self._process, self._ready = self._process, None, False
            await process.stop()
        self._fail("the engine was stopped")

    def _send(self, requests: Sequence[Request]) -> None:
        for request in requests:
            self._journal[request.id] = _JournalEntry(request)
            self._replay.add(request.id)
        self._release()

    def _send_abort(self, request_id: str) -> None:
        self._forget_request(request_id)
        if self._ready and self._process is not None:
            self._process.send(Abort([request_id]))
        self._release()

    def _send_snapshot_request(self) -> None:
        assert self._process is not None, "ask while it is responsive"
        self._process.send(SnapshotRequest())

    def _release(self) -> None:
        """Submit what may go to the engine now, each request with the tokens it already has."""
        if not self._ready or self._process is None:
            return
        if released := self._replay.release():
            entries = [self._journal[request_id] for request_id in released]
            self._process.send(
                Submit([msgspec.structs.replace(entry.request, emitted_ids=list(entry.emitted)) for entry in entries])
            )

    def _forget_request(self, request_id: str) -> None:
        if self._journal.pop(request_id, None) is not None:
            self._replay.end(request_id)

    async def _bring_up(self, tries: int) -> EngineInfo:
        """Start engines until one is ready. Those that fail by their own doing count, and the last one's error is
        raised: ConfigError with what it says it cannot start with, EngineError with its last words."""
        while True:
            await asyncio.sleep(_BACKOFF_SECONDS[min(self._failures, len(_BACKOFF_SECONDS) - 1)])
            try:
                if self._process is None:
                    self.launch()
                return await self._until_ready()
            except _KilledDuringStart as error:
                log.warning("%s; starting another", error)
            except (ConfigError, EngineError) as error:
                self._failures += 1
                if self._failures >= tries:
                    raise
                log.error("engine start %d of %d failed: %s", self._failures, tries, error)
            await self._discard_process()

    async def _until_ready(self) -> EngineInfo:
        process = self._process
        assert process is not None
        process.connect()
        self._ended = ended = asyncio.create_task(process.ended())
        first = asyncio.ensure_future(process.receive())
        try:
            await asyncio.wait((ended, first), return_when=asyncio.FIRST_COMPLETED)
        finally:
            if not first.done():
                first.cancel()
        if not first.done():
            cause = ended.result()
            if cause.outside:
                raise _KilledDuringStart(f"the engine {cause.how} while it started")
            raise EngineError(f"the engine {cause.how} while it started. Its last words:\n{process.last_words}")
        message = first.result()
        if isinstance(message, Failed):
            raise ConfigError(message.message, param=message.param)
        assert isinstance(message, Ready)
        self._ready = True
        return message.info

    async def _discard_process(self) -> None:
        """Of a process that has ended, or is about to."""
        process, self._process = self._process, None
        if process is not None:
            assert self._ended is not None
            await self._ended
            process.close()

    async def _supervise_or_fail(self) -> None:
        """No stream may wait for ever because its supervisor gave up, or tripped over something."""
        try:
            await self._supervise()
        except (ConfigError, EngineError) as error:
            log.error("the engine could not be brought back: %s", error)
            self._fail("the engine could not be brought back")  # callers see this: no last words, no paths
        except Exception as error:
            log.exception("the supervisor failed")
            self._fail(f"the engine's supervisor failed: {type(error).__name__}")

    async def _supervise(self) -> None:
        """See one engine after another to its end. Raises when several in a row do not even start."""
        while True:
            self._release()
            cause = await self._until_exit()
            self._on_exit(cause)
            if self._failures >= self._config.max_engine_starts:
                raise EngineError(f"it {cause.how} with nothing to do, {self._failures} times in a row")
            await self._discard_process()
            began = time.monotonic()
            await self._bring_up(self._config.max_engine_starts)
            log.warning("a new engine is ready after %.1f s", time.monotonic() - began)

    async def _until_exit(self) -> ExitCause:
        """Hand out what an engine sends until it has ended."""
        process, ended = self._process, self._ended
        assert process is not None
        assert ended is not None
        receiving = asyncio.create_task(self._receive(process))
        try:
            await asyncio.wait((ended, receiving), return_when=asyncio.FIRST_COMPLETED)
            if receiving.done():
                receiving.result()
            return await ended
        finally:
            receiving.cancel()

    async def _receive(self, process: EngineProcess) -> None:
        while True:
            message = await process.receive()
            if isinstance(message, SnapshotTaken):
                self.stats = _plus(self._earlier, message.view.stats)
                self._on_snapshot(message.view)
                continue
            assert isinstance(message, Stepped)
            outputs = [self._record(output) for output in message.outputs]
            self._failures = 0
            self._release()
            self._deliver(outputs, _plus(self._earlier, message.stats), message.step)

    def _record(self, output: RequestOutput) -> RequestOutput:
        """Note what came of a request, and say what its client is told."""
        entry = self._journal.get(output.id)
        if entry is None:
            return output
        if output.finish_reason is not None:
            self._forget_request(output.id)
        elif output.new_ids:
            entry.emitted += output.new_ids
            self._replay.progress(output.id, len(output.new_ids))
        if entry.cached_tokens is None:
            entry.cached_tokens = output.cached_tokens
        elif entry.cached_tokens != output.cached_tokens:
            output = msgspec.structs.replace(output, cached_tokens=entry.cached_tokens)
        return output

    def _on_exit(self, cause: ExitCause) -> None:
        """An engine is dead: account for it, and give up what ended several by itself."""
        self._ready = False
        self._on_snapshot(None)
        self.deaths += 1
        self.history.engine_died()
        self._earlier = msgspec.structs.replace(self.stats, running=0, waiting=0, used_blocks=0, cached_blocks=0)
        self.stats = self._earlier
        if not cause.outside and self._replay.idle:
            self._failures += 1  # it ends all by itself: as bad as not to start
        for request_id in self._replay.engine_died(outside=cause.outside):
            self._quarantine(request_id)
        self.replays += len(self._journal)
        log.warning("the engine %s; %d open requests go on with a new one", cause.how, len(self._journal))

    def _quarantine(self, request_id: str) -> None:
        """Its stream ends with an error; what else runs for that call is aborted."""
        self.quarantined += 1
        error = RequestQuarantined("this request ended the engine each time it was tried alone, and was given up")
        log.error("request %s: %s", request_id, error)
        self._streams[request_id].give_up(error)


def _plus(earlier: EngineStats, now: EngineStats) -> EngineStats:
    """Counters go on from the engines before."""
    return msgspec.structs.replace(now, **{name: getattr(earlier, name) + getattr(now, name) for name in _COUNTERS})
