"""The engine in a process of its own that may die at any moment: a new one goes on where it was.

What was submitted and what came of it is held here, in the API process; after a death every open request is submitted
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

from engine.client import EngineClient
from engine.config import EngineConfig
from engine.errors import ConfigError, EngineError
from engine.process import EngineProcess
from engine.replay import Replay
from engine.types import EngineInfo, EngineStats, Request, RequestOutput
from engine.wire import Abort, Failed, Look, Ready, Seen, Stepped, Submit

log = logging.getLogger("quire.supervisor")

_BACKOFF_SECONDS = (0.0, 0.5, 1.0, 2.0, 5.0)
_COUNTERS = ("preemptions", "prefix_queries", "prefix_hits", "prompt_tokens", "generation_tokens", "steps")
QUARANTINED = "this request ended the engine each time it was tried alone, and was given up"


@dataclass(slots=True)
class _Open:
    """The journal of one request: what was asked, and the tokens that were handed out."""

    request: Request
    emitted: list[int] = field(default_factory=list)


class ProcessClient(EngineClient):
    """`launch()` starts the process and returns at once; `start()` waits until it is ready, and supervises it."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__()
        self._config = config
        self._process: EngineProcess | None = None
        self._ready = False
        self._journal: dict[str, _Open] = {}
        self._replay = Replay()
        self._earlier = EngineStats()
        self._task: asyncio.Task[None] | None = None

    def launch(self) -> None:
        self._process = EngineProcess(self._config)

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
        if self._process is None:
            self.launch()
        assert self._process is not None
        ended = asyncio.create_task(self._process.ended())
        try:
            info = await self._until_ready(self._process, ended)
        except BaseException:
            ended.cancel()
            await self.stop()
            raise
        self._task = asyncio.create_task(self._supervise_or_fail(self._process, ended))
        return info

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self._process is not None:
            process, self._process, self._ready = self._process, None, False
            await process.stop()
        self._fail("the engine was stopped")

    def _send(self, requests: Sequence[Request]) -> None:
        for request in requests:
            self._journal[request.id] = _Open(request)
            self._replay.add(request.id)
        self._release()

    def _send_abort(self, request_id: str) -> None:
        self._forget_request(request_id)
        if self._ready and self._process is not None:
            self._process.send(Abort([request_id]))
        self._release()

    def _send_look(self) -> None:
        assert self._process is not None, "ask while it is responsive"
        self._process.send(Look())

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

    async def _until_ready(self, process: EngineProcess, ended: asyncio.Task[str]) -> EngineInfo:
        """Raises ConfigError with what the engine says it cannot start with, EngineError with its last words."""
        process.connect()
        first = asyncio.ensure_future(process.receive())
        await asyncio.wait((ended, first), return_when=asyncio.FIRST_COMPLETED)
        if not first.done():
            first.cancel()
            raise EngineError(f"the engine {ended.result()} while it started. Its last words:\n{process.last_words}")
        message = first.result()
        if isinstance(message, Failed):
            raise ConfigError(message.message, param=message.param)
        assert isinstance(message, Ready)
        self._ready = True
        return message.info

    async def _supervise_or_fail(self, process: EngineProcess, ended: asyncio.Task[str]) -> None:
        """No stream may wait for ever because its supervisor tripped over something."""
        try:
            await self._supervise(process, ended)
        except Exception as error:
            log.exception("the supervisor failed")
            self._fail(f"the engine's supervisor failed: {type(error).__name__}")

    async def _supervise(self, process: EngineProcess, ended: asyncio.Task[str]) -> None:
        """See one engine after another to its end; give up when several in a row do not even start."""
        failures = 0
        while True:
            if self._ready:
                self._release()
                failures = 0
                how = await self._live(process, ended)
                self._bury(how)
            process.close()
            await asyncio.sleep(_BACKOFF_SECONDS[min(failures, len(_BACKOFF_SECONDS) - 1)])
            began = time.monotonic()
            process = self._process = EngineProcess(self._config)
            ended = asyncio.create_task(process.ended())
            try:
                await self._until_ready(process, ended)
                log.warning("a new engine is ready after %.1f s", time.monotonic() - began)
            except (ConfigError, EngineError) as error:
                failures += 1
                log.error("engine start %d of %d failed: %s", failures, self._config.max_engine_starts, error)
                await asyncio.wait([ended])
                if failures >= self._config.max_engine_starts:
                    process.close()
                    self._process = None
                    self._fail(f"the engine could not be brought back: {error}")
                    return

    async def _live(self, process: EngineProcess, ended: asyncio.Task[str]) -> str:
        """Hand out what an engine sends until it has ended; how it did."""
        receiving = asyncio.create_task(self._receive(process))
        try:
            await asyncio.wait((ended, receiving), return_when=asyncio.FIRST_COMPLETED)
            if receiving.done():
                receiving.result()
            return await ended
        finally:
            receiving.cancel()
            if not ended.done():
                ended.cancel()

    async def _receive(self, process: EngineProcess) -> None:
        while True:
            message = await process.receive()
            if isinstance(message, Seen):
                self.stats = _plus(self._earlier, message.view.stats)
                self._saw(message.view)
                continue
            assert isinstance(message, Stepped)
            outputs = message.outputs.outputs
            for output in outputs:
                self._record(output)
            self._release()
            self._deliver(outputs, _plus(self._earlier, message.outputs.stats))

    def _record(self, output: RequestOutput) -> None:
        entry = self._journal.get(output.id)
        if entry is None:
            return
        if output.finish_reason is not None:
            self._forget_request(output.id)
        elif output.new_ids:
            entry.emitted += output.new_ids
            self._replay.progress(output.id)

    def _bury(self, how: str) -> None:
        """An engine is dead: account for it, and give up what killed several by itself."""
        self._ready = False
        self._saw_nothing()
        self.deaths += 1
        self._earlier = msgspec.structs.replace(self.stats, running=0, waiting=0, used_blocks=0, cached_blocks=0)
        self.stats = self._earlier
        given_up = self._replay.engine_died()
        self.replays += len(self._journal) - len(given_up)
        log.warning("the engine %s; %d open requests go on with a new one", how, len(self._journal) - len(given_up))
        for request_id in given_up:
            self.quarantined += 1
            log.error("request %s: %s", request_id, QUARANTINED)
            self._journal.pop(request_id)
            self._deliver([RequestOutput(request_id, [], finish_reason="error", error=QUARANTINED)], self.stats)


def _plus(earlier: EngineStats, now: EngineStats) -> EngineStats:
    """Counters go on from the engines before."""
    return msgspec.structs.replace(now, **{name: getattr(earlier, name) + getattr(now, name) for name in _COUNTERS})
