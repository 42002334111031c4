"""The server's side of its workers: which job is next, which process does it, and when it is killed."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import TypeVar

from quire.engine import clock
from quire.engine.errors import EngineError, InvalidRequest, Overloaded
from quire.engine.processes.child import Child, module
from quire.engine.processes.procfs import Standstill
from quire.engine.replicas.cores import usable_cpus
from quire.server.access.tenants import Tenant
from quire.server.budget import Budget
from quire.server.config import ServerConfig
from quire.server.served_model import ModelSource, ServedModel
from quire.server.workers.frames import frame, receive
from quire.server.workers.queue import JobQueue, WorkerTurn
from quire.server.workers.worker import Job, Limits

Result = TypeVar("Result")

MAX_WAITING = 1024
CANNOT_START = "the process that reads large requests cannot be started"
STOOD_STILL = "The process that prepared the request stood still, and was ended. Please try again"
NO_KEYS: dict[str, object] = {"api_key": [], "api_key_file": None, "admin_api_key": []}
"""Settings that workers, which run callers' templates, need not know."""
NO_BACKTRACE = {"RUST_BACKTRACE": "0"}
"""Of workers' environment. Where an allocation fails, Rust ends the process, but with a backtrace it first allocates
more for that, while it holds a lock, and waits for itself for ever."""
MEMORY = 256 << 20
"""Bytes that a worker may take for one body."""


@dataclass(eq=False, slots=True)
class _Worker:
    """A worker process and the socket to it."""

    pid: int
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter


LaunchWorkers = Callable[..., Child]


class WorkerPool:
    """Runs functions of a body's bytes, the model and the configuration. The process that forks workers starts with
    `start`, or when it is first needed."""

    def __init__(self, source: ModelSource, adapters: Collection[str] = (), launch: LaunchWorkers = Child) -> None:
        """`adapters`: the model's, as they come and go. `launch`: starts the process that forks."""
        self._source = source
        self._launch = launch
        self._adapters = adapters
        self.slots = min(8, max(2, usable_cpus() // 2))
        """Workers at the same time."""
        self._queue = JobQueue(self.slots)
        self._waiting = Budget(MAX_WAITING)
        """Jobs that wait, by tenant: one that has many gets more only while as many are left to others."""
        self._idle: list[_Worker] = []
        self._busy: set[_Worker] = set()
        self._unclaimed: list[asyncio.Task[_Worker]] = []
        """Workers on their way whose callers have left: the next ones take them, so few are ever asked for at once."""
        self._given_up: Exception | None = None
        """What jobs raise whose workers are killed because the server ends."""
        self._starting: asyncio.Task[None] | None = None
        """Starts the process that forks. Who waits for it may leave, it goes on."""
        self._process: Child | None = None
        self._control: socket.socket | None = None

    @property
    def pids(self) -> list[int]:
        """Of the workers' processes."""
        return [worker.pid for worker in (*self._idle, *self._busy)]

    @property
    def jobs(self) -> int:
        """How many jobs wait or run."""
        return len(self._queue) + len(self._busy)

    @property
    def busy(self) -> int:
        """How many of them work."""
        return len(self._busy)

    async def run(
        self,
        work: Callable[[bytes, ServedModel, ServerConfig], Result],
        pieces: Sequence[bytes],
        tenant: Tenant,
        *,
        slow: bool = False,
        beside: int = 0,
    ) -> Result:
        """`work` of the joined pieces of a body, in a worker; `slow`: see Turn; `beside`: bytes that `work` itself has.

        Raises what `work` raises, Overloaded when too much waits or the worker stands still, InvalidRequest when it
        takes more time or memory than a worker may. Cancelling it kills the worker.
        """
        size = sum(map(len, pieces)) + beside
        limits = Limits(seconds=2.0 + size / 250_000, memory=MEMORY + 2 * size)
        too_much = InvalidRequest("The request takes too much time or memory to be prepared. Please make it smaller")
        return await self.within(limits, work, pieces, tenant, too_much, slow=slow, beside=beside)

    async def within(
        self,
        limits: Limits,
        work: Callable[[bytes, ServedModel, ServerConfig], Result],
        pieces: Sequence[bytes],
        tenant: Tenant,
        too_much: InvalidRequest,
        *,
        slow: bool,
        beside: int = 0,
    ) -> Result:
        """As `run`. Raises `too_much` where the limits end it."""
        if self._given_up is not None:
            raise self._given_up
        if not self._waiting.fits(tenant.name, 1):
            raise Overloaded("Too many requests wait to be prepared. Please try again later")
        turn = WorkerTurn(tenant, sum(map(len, pieces)) + beside, asyncio.get_running_loop().create_future(), slow)
        self._queue.add(turn)
        try:
            await self._granted(turn)
            worker = self._idle_worker() or await self._new_worker()
            return await self._run_in(worker, Job(work, limits, tuple(self._adapters)), pieces, too_much)
        finally:
            self._queue.end(turn)

    async def _granted(self, turn: WorkerTurn) -> None:
        if not turn.granted.done():
            self._waiting.take(turn.tenant.name, 1)
            try:
                await turn.granted
            finally:
                self._waiting.take(turn.tenant.name, -1)
        turn.granted.result()

    def start(self) -> asyncio.Task[None]:
        """Start the process that forks, unless it runs or is about to. Raises OSError when awaited."""
        if self._starting is None or (self._starting.done() and not self._can_fork):
            self._starting = asyncio.create_task(self._start())
            self._starting.add_done_callback(lambda task: None if task.cancelled() else task.exception())
        return self._starting

    async def close(self) -> None:
        for worker in (*self._idle, *self._busy):
            worker.writer.close()
        self._idle.clear()
        for coming in self._unclaimed:
            coming.cancel()
        await asyncio.gather(*self._unclaimed, return_exceptions=True)
        if self._starting is not None:
            await asyncio.wait([self._starting])
        if self._control is not None:
            self._control.close()
        if self._process is not None:
            await self._process.kill()

    async def _run_in(self, worker: _Worker, job: Job, pieces: Sequence[bytes], too_much: InvalidRequest) -> Result:
        self._busy.add(worker)
        stays = False
        try:
            with watched(worker.pid) as watch:
                worker.writer.writelines(frame(job, pieces))
                await worker.writer.drain()
                (done, value, stays), _ = await receive(worker.reader)
        except (EOFError, ConnectionError):
            raise self._given_up or (Overloaded(STOOD_STILL) if watch.has_killed else too_much) from None
        finally:
            self._busy.discard(worker)
            if stays:
                self._idle.append(worker)
            else:
                self._kill(worker)
        if done is None:
            raise RuntimeError(f"in a worker process:\n{value}")
        if not done:
            raise value
        return value

    def give_up(self, error: Exception) -> None:
        """End all jobs, which raise `error`, as later ones do."""
        self._given_up = error
        self._queue.fail(error)
        for worker in list(self._busy):
            self._kill(worker)

    def _kill(self, worker: _Worker) -> None:
        worker.writer.close()
        with suppress(ProcessLookupError):
            os.kill(worker.pid, signal.SIGKILL)

    def _idle_worker(self) -> _Worker | None:
        while self._idle:
            worker = self._idle.pop()
            if not worker.reader.at_eof():
                return worker
            worker.writer.close()  # somebody else has killed it
        return None

    async def _new_worker(self) -> _Worker:
        coming = self._unclaimed.pop() if self._unclaimed else asyncio.create_task(self._fork())
        try:
            return await asyncio.shield(coming)
        except asyncio.CancelledError:
            self._unclaimed.append(coming)
            raise

    async def _fork(self) -> _Worker:
        """Raises EngineError when the process that forks cannot be started, or dies again."""
        for tries in (1, 2):
            process: Child | None = None
            try:
                await asyncio.shield(self.start())
                process = self._process
                assert process is not None
                with watched(process.pid):
                    return await self._ask_for_worker()
            except (OSError, EOFError) as error:
                if tries == 2:
                    raise EngineError(CANNOT_START) from error
            if process is not None:
                await process.kill()  # it has died, cannot fork, or stood still: another one takes its place
        raise AssertionError("the second try returns or raises")

    async def _ask_for_worker(self) -> _Worker:
        """Raises OSError or EOFError where none comes."""
        assert self._control is not None
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                socket.send_fds(self._control, [b"f"], [theirs.fileno()])
                reader, writer = await asyncio.open_connection(sock=ours)
            except BaseException:
                ours.close()
                raise
        try:
            pid, _ = await receive(reader)
        except BaseException:
            writer.close()
            raise
        return _Worker(pid, reader, writer)

    @property
    def _can_fork(self) -> bool:
        return self._process is not None and self._process.returncode is None

    async def _start(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = process = self._launch(
                [*module("quire.server.workers.worker"), str(theirs.fileno())],
                descriptors=[theirs.fileno()],
                environment=os.environ | NO_BACKTRACE,
            )
        if self._control is not None:
            self._control.close()
        self._control = ours
        source = replace(self._source, config=self._source.config.model_copy(update=NO_KEYS))
        message = b"".join(frame(source))
        try:
            with watched(process.pid):
                await asyncio.to_thread(ours.sendall, message)  # it is read when the modules are imported
        except OSError:
            await process.kill()
            raise


STILL_SECONDS = 5.0
"""A process is killed that does nothing for so long, though it was asked for something and could compute."""
_LOOK_SECONDS = 0.25


class Watch:
    """Watches one process."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self.has_killed = False

    async def run(self) -> None:
        await asyncio.sleep(_LOOK_SECONDS)  # most jobs have ended by then
        standstill, last = Standstill(self._pid), clock.monotonic()
        seconds = 0.0
        while seconds < STILL_SECONDS:
            await asyncio.sleep(_LOOK_SECONDS)
            # Where it was this process that could not run, the other one may have been stopped with it.
            last, elapsed = clock.monotonic(), min(clock.monotonic() - last, 2 * _LOOK_SECONDS)
            seconds = standstill.advance(elapsed)
        self.has_killed = True
        with suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGKILL)


@contextmanager
def watched(pid: int) -> Iterator[Watch]:
    """Within the block, which waits for this process, it is killed when it stands still."""
    watch = Watch(pid)
    task = asyncio.create_task(watch.run())
    try:
        yield watch
    finally:
        task.cancel()
