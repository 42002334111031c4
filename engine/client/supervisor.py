"""Runs the engine in a process of its own and replaces that process when it ends; open streams continue.

The API process keeps a journal of every open request: the request and the tokens that were handed out. When an engine
process ends, each open request is submitted to the next one together with those tokens. As a token depends on nothing
but its own request, the stream continues with the tokens that the first engine would have given.
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
from quire.engine.client.messages import Abort, Failed, Ready, SnapshotRequest, SnapshotTaken, Stepped, Submit
from quire.engine.client.process import EngineProcess
from quire.engine.client.replay import Replay
from quire.engine.config import EngineConfig
from quire.engine.errors import ConfigError, EngineError, RequestQuarantined
from quire.engine.types import EngineInfo, EngineStats, Request, RequestOutput

log = logging.getLogger("quire.supervisor")

_BACKOFF_SECONDS = (0.0, 0.5, 1.0, 2.0, 5.0)
"""Wait before a start, by the number of failures in a row before it."""
_COUNTERS = ("preemptions", "prefix_queries", "prefix_hits", "prompt_tokens", "generation_tokens", "steps")
"""Fields of EngineStats that only ever grow."""


@dataclass(slots=True)
class _JournalEntry:
    """One open request and the tokens that were handed out for it."""

    request: Request
    emitted: list[int] = field(default_factory=list)
    cached_tokens: int | None = None
    """How many prompt tokens the first engine that computed it found cached; None before that. Clients are told this
    number also after a replay, which finds a different one."""


class _KilledDuringStart(EngineError):
    """The engine process was ended from outside while it started."""


class ProcessClient(EngineClient):
    """An engine process, replaced when it ends.

    `launch()` starts the process and returns at once; `start()` waits until it is ready and supervises it from then on.
    """

    def __init__(self, config: EngineConfig) -> None:
        super().__init__()
        self._config = config
        self._process: EngineProcess | None = None
        self._ready = False
        """Whether the process has started and accepts requests."""
        self._journal: dict[str, _JournalEntry] = {}
        """By id of an open request."""
        self._replay = Replay()
        self._earlier_stats = EngineStats()
        """Counters added up over the engine processes before this one."""
        self._exit: asyncio.Task[ExitCause] | None = None
        """Done when the process has ended."""
        self._supervisor: asyncio.Task[None] | None = None
        self._failures = 0
        """Engine processes in a row that failed to start, or that crashed with nothing to compute."""

    def launch(self) -> None:
        """Start the engine process. Raises EngineError when the system can start no process."""
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
        """Whether the engine has started and its last heartbeat is recent enough."""
        process = self._process
        return self._ready and process is not None and process.silence < self._config.engine_heartbeat_timeout

    async def start(self) -> EngineInfo:
        try:
            info = await self._start_engine(tries=1)
        except BaseException:
            await self.stop()
            raise
        self._supervisor = asyncio.create_task(self._supervise_or_fail())
        return info

    async def stop(self) -> None:
        if self._supervisor is not None:
            self._supervisor.cancel()
            await asyncio.gather(self._supervisor, return_exceptions=True)
        if self._exit is not None:
            self._exit.cancel()
            await asyncio.gather(self._exit, return_exceptions=True)
        if self._process is not None:
            process, self._process, self._ready = self._process, None, False
            await process.stop()
        self._fail("the engine was stopped")

    def _send(self, requests: Sequence[Request]) -> None:
        for request in requests:
            self._journal[request.id] = _JournalEntry(request)
            self._replay.add(request.id)
        self._submit_ready()

    def _send_abort(self, request_id: str) -> None:
        self._close_journal(request_id)
        if self._ready and self._process is not None:
            self._process.send(Abort([request_id]))
        self._submit_ready()

    def _send_snapshot_request(self) -> None:
        assert self._process is not None, "ask while it is responsive"
        self._process.send(SnapshotRequest())

    def _submit_ready(self) -> None:
        """Submit the requests that may go to the engine now, each with the tokens it already has."""
        if not self._ready or self._process is None:
            return
        if ready := self._replay.take_ready():
            entries = [self._journal[request_id] for request_id in ready]
            self._process.send(
                Submit([msgspec.structs.replace(entry.request, emitted_ids=list(entry.emitted)) for entry in entries])
            )

    def _close_journal(self, request_id: str) -> None:
        if self._journal.pop(request_id, None) is not None:
            self._replay.end(request_id)

    async def _start_engine(self, tries: int) -> EngineInfo:
        """Start engine processes until one is ready.

        After `tries` failures in a row, raises the last one's error: ConfigError for a configuration that the engine
        cannot start with, EngineError with its last lines of standard error. A start that was ended from outside does
        not count as a failure.
        """
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
        self._exit = exited = asyncio.create_task(process.wait_for_exit())
        first_message = asyncio.ensure_future(process.receive())
        try:
            await asyncio.wait((exited, first_message), return_when=asyncio.FIRST_COMPLETED)
        finally:
            if not first_message.done():
                first_message.cancel()
        if not first_message.done():
            cause = exited.result()
            what = f"the engine {cause.description} while it started"
            if cause.external:
                raise _KilledDuringStart(what)
            raise EngineError(f"{what}. Its last words:\n{process.last_stderr}")
        message = first_message.result()
        if isinstance(message, Failed):
            raise ConfigError(message.message, param=message.param)
        assert isinstance(message, Ready)
        self._ready = True
        return message.info

    async def _discard_process(self) -> None:
        """Wait until the process has ended, and free its pipes and socket."""
        process, self._process = self._process, None
        if process is not None:
            assert self._exit is not None
            await self._exit
            process.close()

    async def _supervise_or_fail(self) -> None:
        """Supervise; end all streams with an error if that fails, so that none waits for ever."""
        try:
            await self._supervise()
        except (ConfigError, EngineError) as error:
            log.error("the engine could not be brought back: %s", error)
            # Clients see this message, so it must not contain the engine's standard error, which has paths in it.
            self._fail("the engine could not be brought back")
        except Exception as error:
            log.exception("the supervisor failed")
            self._fail(f"the engine's supervisor failed: {type(error).__name__}")

    async def _supervise(self) -> None:
        """Serve with one engine process after another. Raises an error when too many of them fail in a row."""
        while True:
            self._submit_ready()
            cause = await self._serve_until_exit()
            self._on_engine_exit(cause)
            if self._failures >= self._config.max_engine_starts:
                raise EngineError(f"it {cause.description} with nothing to do, {self._failures} times in a row")
            await self._discard_process()
            began = time.monotonic()
            await self._start_engine(self._config.max_engine_starts)
            log.warning("a new engine is ready after %.1f s", time.monotonic() - began)

    async def _serve_until_exit(self) -> ExitCause:
        """Handle the engine's messages until its process has ended."""
        process, exited = self._process, self._exit
        assert process is not None
        assert exited is not None
        receiving = asyncio.create_task(self._receive(process))
        try:
            await asyncio.wait((exited, receiving), return_when=asyncio.FIRST_COMPLETED)
            if receiving.done():
                receiving.result()
            return await exited
        finally:
            receiving.cancel()

    async def _receive(self, process: EngineProcess) -> None:
        while True:
            message = await process.receive()
            if isinstance(message, SnapshotTaken):
                self.stats = _add_counters(self._earlier_stats, message.view.stats)
                self._on_snapshot(message.view)
                continue
            assert isinstance(message, Stepped)
            outputs = [self._update_journal(output) for output in message.outputs]
            self._failures = 0
            self._submit_ready()
            self._deliver(outputs, _add_counters(self._earlier_stats, message.stats), message.step)

    def _update_journal(self, output: RequestOutput) -> RequestOutput:
        """Record an output in the journal; returns it as the client is to see it, with the first cached_tokens."""
        entry = self._journal.get(output.id)
        if entry is None:
            return output
        if output.finish_reason is not None:
            self._close_journal(output.id)
        elif output.new_ids:
            entry.emitted += output.new_ids
            self._replay.progress(output.id, len(output.new_ids))
        if entry.cached_tokens is None:
            entry.cached_tokens = output.cached_tokens
        elif entry.cached_tokens != output.cached_tokens:
            output = msgspec.structs.replace(output, cached_tokens=entry.cached_tokens)
        return output

    def _on_engine_exit(self, cause: ExitCause) -> None:
        """Update counters and history after an engine has ended, and give up requests that have ended several."""
        self._ready = False
        self._on_snapshot(None)
        self.deaths += 1
        self.history.engine_died()
        self._earlier_stats = msgspec.structs.replace(self.stats, running=0, waiting=0, used_blocks=0, cached_blocks=0)
        self.stats = self._earlier_stats
        if not cause.external and self._replay.idle:
            self._failures += 1  # an engine that crashes with nothing to compute is as useless as one that cannot start
        for request_id in self._replay.engine_exited(external=cause.external):
            self._quarantine(request_id)
        self.replays += len(self._journal)
        log.warning("the engine %s; %d open requests go on with a new one", cause.description, len(self._journal))

    def _quarantine(self, request_id: str) -> None:
        """End the request's stream with an error; this aborts the other requests of its call."""
        self.quarantined += 1
        error = RequestQuarantined("this request ended the engine each time it was tried alone, and was given up")
        log.error("request %s: %s", request_id, error)
        self._streams[request_id].give_up(error)


def _add_counters(earlier: EngineStats, now: EngineStats) -> EngineStats:
    """`now`, with its counters increased by those of earlier engine processes."""
    return msgspec.structs.replace(now, **{name: getattr(earlier, name) + getattr(now, name) for name in _COUNTERS})
