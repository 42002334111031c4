"""The server's side of body workers: picks the next job, gives it a process, and kills the process if needed."""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
import socket
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

from quire.engine.common.errors import EngineError, InvalidRequest, Overloaded
from quire.engine.processes.child import Child, module
from quire.engine.processes.cpu_cores import usable_cpus
from quire.engine.processes.frames import encode_frame, frame_pieces, receive_frame
from quire.engine.processes.procfs import Standstill, WatchTimer, exit_signal, oom_kills
from quire.server.access.tenants import Tenant
from quire.server.config import ServerConfig
from quire.server.served_model import ServedModel, ServedModelSpec
from quire.server.shared_capacity import SharedCapacity
from quire.server.workers.job_queue import JobQueue, WorkerSlotClaim
from quire.server.workers.worker import JobLimits, WorkerJob, decode_job_result, decode_worker_started

Result = TypeVar("Result")

MAX_WAITING_JOBS = 1024
CANNOT_START = "the process that reads large requests cannot be started"
STALLED = "The process that prepared the request hung and was stopped. Please try again"
KILLED = "The process that prepared the request was killed. Please try again"
CLEARED_API_KEYS: dict[str, object] = {
    "api_key": [],
    "api_key_file": None,
    "admin_api_key": [],
    "metrics_api_key": [],
}
"""API keys are removed from the workers' configuration, because workers run callers' templates."""
NO_BACKTRACE_ENV = {"RUST_BACKTRACE": "0"}
"""When a worker's allocation fails, Rust ends the process. With backtraces, Rust would first allocate memory under a
lock, and deadlock.
"""
WORKER_MEMORY_BYTES = 256 << 20
"""A worker's memory may grow by this much, plus twice the body's size, for one body."""


@dataclass(eq=False, slots=True)
class _WorkerProcess:
    pid: int
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter


class _WorkerKilled(Exception):
    """The worker was killed by another process, as far as is known."""

    def __init__(self, error: Exception) -> None:
        """`error` is raised to the request if the worker of the second try is killed too."""
        self.error = error


LaunchProcess = Callable[..., Child]
_pickle = partial(pickle.dumps, protocol=pickle.HIGHEST_PROTOCOL)


class WorkerPool:
    """`start_fork_server`, or the first job, starts the process that forks workers."""

    def __init__(
        self, source: ServedModelSpec, adapters: Collection[str] = (), launch_process: LaunchProcess = Child
    ) -> None:
        self._source = source
        self._launch_process = launch_process
        self._adapters = adapters
        self.max_workers = min(8, max(2, usable_cpus() // 2))
        self._queue = JobQueue(self.max_workers)
        self._waiting_budget = SharedCapacity(MAX_WAITING_JOBS)
        self._idle_workers: list[_WorkerProcess] = []
        self._busy_workers: set[_WorkerProcess] = set()
        self._unclaimed_forks: list[asyncio.Task[_WorkerProcess]] = []
        self._shutdown_error: Exception | None = None
        self._is_closed = False
        self._start_task: asyncio.Task[None] | None = None
        """The start continues if the caller that waits for it is cancelled."""
        self._fork_server: Child | None = None
        self._fork_socket: socket.socket | None = None

    @property
    def worker_pids(self) -> list[int]:
        return [worker.pid for worker in (*self._idle_workers, *self._busy_workers)]

    @property
    def num_jobs(self) -> int:
        return len(self._queue) + len(self._busy_workers)

    @property
    def num_busy(self) -> int:
        return len(self._busy_workers)

    async def run_job(
        self,
        work: Callable[[bytes, ServedModel, ServerConfig], Result],
        pieces: Sequence[bytes],
        tenant: Tenant,
        *,
        is_slow: bool = False,
        extra_bytes: int = 0,
    ) -> Result:
        """Cancelling this call kills the worker. `extra_bytes`: size of the arguments bound to `work`. Raises the
        errors of `work`, Overloaded if too many jobs wait or the worker hangs, InvalidRequest if the job exceeds a
        worker's time or memory, and EngineError if no worker can be started.
        """
        size = sum(map(len, pieces)) + extra_bytes
        limits = JobLimits(cpu_seconds=2.0 + size / 250_000, memory_bytes=WORKER_MEMORY_BYTES + 2 * size)
        limit_error = InvalidRequest("The request takes too much time or memory to be prepared. Please make it smaller")
        return await self.run_limited_job(
            limits, work, pieces, tenant, limit_error, is_slow=is_slow, extra_bytes=extra_bytes
        )

    async def run_limited_job(
        self,
        limits: JobLimits,
        work: Callable[[bytes, ServedModel, ServerConfig], Result],
        pieces: Sequence[bytes],
        tenant: Tenant,
        limit_error: InvalidRequest,
        *,
        is_slow: bool,
        extra_bytes: int = 0,
    ) -> Result:
        """Raises `limit_error` if the job exceeds `limits`; otherwise raises as `run_job` does."""
        if self._shutdown_error is not None:
            raise self._shutdown_error
        if not self._waiting_budget.has_room(tenant.name, 1):
            raise Overloaded("Too many requests are waiting to be prepared. Please try again later")
        claim = WorkerSlotClaim(
            tenant, sum(map(len, pieces)) + extra_bytes, asyncio.get_running_loop().create_future(), is_slow
        )
        self._queue.add_job(claim)
        try:
            await self._wait_for_slot(claim)
            job = WorkerJob(limits, tuple(self._adapters))
            message = [encode_frame(job), *frame_pieces([_pickle(work)]), *frame_pieces(pieces)]
            result: Result
            try:
                result = await self._run_on_worker(await self._get_worker(), message, limit_error)
            except _WorkerKilled as killed:
                if self._is_closed:
                    raise killed.error from None
                if self._shutdown_error is not None:
                    raise self._shutdown_error from None
                try:
                    result = await self._run_on_worker(await self._get_worker(), message, limit_error)
                except _WorkerKilled as again:
                    raise again.error from None
            return result
        finally:
            self._queue.end_job(claim)

    async def _wait_for_slot(self, claim: WorkerSlotClaim) -> None:
        if not claim.grant_future.done():
            self._waiting_budget.adjust_held_amount(claim.tenant.name, 1)
            try:
                await claim.grant_future
            finally:
                self._waiting_budget.adjust_held_amount(claim.tenant.name, -1)
        claim.grant_future.result()

    def start_fork_server(self) -> asyncio.Task[None]:
        """Awaiting the task raises OSError if the start fails."""
        if self._start_task is None or (self._start_task.done() and not self._is_fork_server_alive):
            self._start_task = asyncio.create_task(self._launch_fork_server())
            self._start_task.add_done_callback(lambda task: None if task.cancelled() else task.exception())
        return self._start_task

    async def close(self) -> None:
        self._is_closed = True
        for worker in (*self._idle_workers, *self._busy_workers):
            worker.writer.close()
        self._idle_workers.clear()
        for coming in self._unclaimed_forks:
            coming.cancel()
        await asyncio.gather(*self._unclaimed_forks, return_exceptions=True)
        if self._start_task is not None:
            await asyncio.wait([self._start_task])
        if self._fork_socket is not None:
            self._fork_socket.close()
        if self._fork_server is not None:
            await self._fork_server.stop(0.0)

    async def _run_on_worker(
        self, worker: _WorkerProcess, message: Sequence[bytes], limit_error: InvalidRequest
    ) -> Any:
        self._busy_workers.add(worker)
        is_reusable = False
        kills_before = oom_kills()
        try:
            with kill_on_stall(worker.pid) as watch:
                worker.writer.writelines(message)
                await worker.writer.drain()
                result = decode_job_result(await receive_frame(worker.reader))
                value = pickle.loads(await receive_frame(worker.reader))
                is_reusable = result.is_reusable
        except (EOFError, ConnectionError):
            if self._shutdown_error is not None:
                raise self._shutdown_error from None
            if watch.has_killed:
                raise Overloaded(STALLED) from None
            cause = exit_signal(worker.pid)  # limits end a worker by other signals or by an exit
            if cause not in (signal.SIGKILL, None) or oom_kills() != kills_before:
                raise limit_error from None
            raise _WorkerKilled(Overloaded(KILLED) if cause == signal.SIGKILL else limit_error) from None
        finally:
            self._busy_workers.discard(worker)
            if is_reusable:
                self._idle_workers.append(worker)
            else:
                self._kill_worker(worker)
        if result.succeeded is None:
            raise RuntimeError(f"in a worker process:\n{value}")
        if not result.succeeded:
            raise value
        return value

    def fail_jobs(self, error: Exception) -> None:
        self._shutdown_error = error
        self._queue.fail_waiting_jobs(error)
        for worker in list(self._busy_workers):
            self._kill_worker(worker)

    def _kill_worker(self, worker: _WorkerProcess) -> None:
        worker.writer.close()
        with suppress(ProcessLookupError):
            os.kill(worker.pid, signal.SIGKILL)

    async def _get_worker(self) -> _WorkerProcess:
        return self._take_idle_worker() or await self._fork_or_claim_worker()

    def _take_idle_worker(self) -> _WorkerProcess | None:
        while self._idle_workers:
            worker = self._idle_workers.pop()
            if not worker.reader.at_eof():
                return worker
            worker.writer.close()  # another process has killed it
        return None

    async def _fork_or_claim_worker(self) -> _WorkerProcess:
        fork_task = (
            self._unclaimed_forks.pop() if self._unclaimed_forks else asyncio.create_task(self._fork_with_retry())
        )
        try:
            return await asyncio.shield(fork_task)
        except asyncio.CancelledError:
            self._unclaimed_forks.append(fork_task)
            raise

    async def _fork_with_retry(self) -> _WorkerProcess:
        for tries in (1, 2):
            process: Child | None = None
            try:
                await asyncio.shield(self.start_fork_server())
                process = self._fork_server
                assert process is not None
                with kill_on_stall(process.pid):
                    return await self._request_fork()
            except (OSError, EOFError) as error:
                if tries == 2:
                    raise EngineError(CANNOT_START) from error
            if process is not None:
                await process.stop(0.0)  # it died, cannot fork, or hung; the next try starts another one
        raise AssertionError("the second try returns or raises")

    async def _request_fork(self) -> _WorkerProcess:
        assert self._fork_socket is not None
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                socket.send_fds(self._fork_socket, [b"f"], [theirs.fileno()])
                reader, writer = await asyncio.open_connection(sock=ours)
            except BaseException:
                ours.close()
                raise
        try:
            started = decode_worker_started(await receive_frame(reader))
        except BaseException:
            writer.close()
            raise
        return _WorkerProcess(started.pid, reader, writer)

    @property
    def _is_fork_server_alive(self) -> bool:
        return self._fork_server is not None and self._fork_server.returncode is None

    async def _launch_fork_server(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self._fork_server = process = self._launch_process(
                [*module("quire.server.workers.worker"), str(theirs.fileno())],
                descriptors=[theirs.fileno()],
                environment=os.environ | NO_BACKTRACE_ENV,
            )
        if self._fork_socket is not None:
            self._fork_socket.close()
        self._fork_socket = ours
        source = replace(self._source, config=self._source.config.model_copy(update=CLEARED_API_KEYS))
        message = b"".join(frame_pieces([_pickle(source)]))
        try:
            with kill_on_stall(process.pid):
                await asyncio.to_thread(process.send, message)  # the process reads it after its imports
        except OSError:
            await process.stop(0.0)
            raise


STALL_SECONDS = 5.0
"""A process that has work and could compute, but does nothing for this long, is killed."""
_POLL_SECONDS = 0.25


class StallWatch:
    def __init__(self, pid: int) -> None:
        self._pid = pid
        self.has_killed = False

    async def kill_when_stalled(self) -> None:
        await asyncio.sleep(_POLL_SECONDS)  # most jobs end earlier
        standstill, timer = Standstill(self._pid), WatchTimer(_POLL_SECONDS)
        seconds = 0.0
        while seconds < STALL_SECONDS:
            await asyncio.sleep(_POLL_SECONDS)
            seconds = standstill.advance(timer.measure_elapsed())
        self.has_killed = True
        with suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGKILL)


@contextmanager
def kill_on_stall(pid: int) -> Iterator[StallWatch]:
    watch = StallWatch(pid)
    task = asyncio.create_task(watch.kill_when_stalled())
    try:
        yield watch
    finally:
        task.cancel()
