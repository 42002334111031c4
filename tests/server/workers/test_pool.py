"""Workers give the same results as this process, are ended by limits, and keep nothing of one job for the next."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from quire.engine.common.errors import ContextLengthExceeded, EngineError, InvalidRequest, Overloaded
from quire.engine.processes.child import Child
from quire.engine.processes.procfs import state
from quire.server.access.rate_limits import RateLimits
from quire.server.access.tenants import Tenant
from quire.server.config import ServerConfig
from quire.server.served_model import ServedModelSpec
from quire.server.workers import pool as pools
from quire.server.workers.pool import LaunchProcess, WorkerPool
from quire.server.workers.worker import JobLimits
from tests.server.forked import FORKED
from tests.server.workers import works
from tests.texts import byte_level_tokenizer
from tests.tree import ROOT

ANYBODY = Tenant("", b"", RateLimits(None, None))
SOURCE = ServedModelSpec(
    ServerConfig(api_key=["secret"], admin_api_key=["more secret"], metrics_api_key=["scraper"]),
    byte_level_tokenizer().tokenizer,
    vocab_size=320,
    sampling_defaults={},
    context_length=100,
)
MODEL = SOURCE.build_served_model()
TOO_MUCH = InvalidRequest("too much")
PLENTY = JobLimits(cpu_seconds=60, memory_bytes=1 << 30)


@pytest.fixture(autouse=True)
def make_tests_importable_in_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


@asynccontextmanager
async def open_pool(source: ServedModelSpec = SOURCE, launch: LaunchProcess = FORKED) -> AsyncIterator[WorkerPool]:
    """`launch`: Child starts the fork server as a real server does, with all its imports."""
    pool = WorkerPool(source, launch_process=launch)
    try:
        yield pool
    finally:
        await pool.close()


async def run_limited(pool: WorkerPool, work: Any, given: bytes = b"", limits: JobLimits = PLENTY) -> Any:
    return await pool.run_limited_job(limits, work, [given], ANYBODY, TOO_MUCH, is_slow=False)


async def wait_for_exit(pid: int) -> None:
    async with asyncio.timeout(30):
        while state(Path(f"/proc/{pid}")) not in ("Z", ""):  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_pool_runs_jobs_in_processes_that_end_when_it_closes() -> None:
    async with open_pool(launch=Child) as pool:
        assert pool.worker_pids == []
        worker_pid = await pool.run_job(works.pid, [b"x"], ANYBODY)
        assert worker_pid != os.getpid()
        assert pool.worker_pids == [worker_pid]
        assert await pool.run_job(works.pid, [b"x" * 5000], ANYBODY) == worker_pid
        sleeping = asyncio.create_task(run_limited(pool, works.asleep))
        await asyncio.sleep(0.2)
        assert pool._fork_server is not None
        pids = {worker_pid, pool._fork_server.pid, *pool.worker_pids}
    for pid in pids:
        await wait_for_exit(pid)
    with pytest.raises(InvalidRequest):
        await sleeping


async def test_worker_receives_body_sent_in_chunks() -> None:
    async with open_pool() as pool:
        body = "".join(chr(1000 + i % 5000) for i in range(300_000)).encode()
        pieces = [body[:1], body[1:70_000], b"", body[70_000:]]
        here = works.length(body, MODEL, SOURCE.config)
        assert await pool.run_job(works.length, pieces, ANYBODY) == (*here[:2], True)


async def test_worker_errors_are_raised_in_pool_caller() -> None:
    async with open_pool() as pool:
        with pytest.raises(ContextLengthExceeded) as raised:
            await run_limited(pool, works.refusal)
        assert (raised.value.message, raised.value.param) == ("too long", "prompt")
        with pytest.raises(RuntimeError, match=r"works\.py(.|\n)*LookupError: our own mistake"):
            await run_limited(pool, works.mistake)


async def test_workers_do_not_receive_api_keys() -> None:
    async with open_pool() as pool:
        assert await run_limited(pool, works.keys) == []


@pytest.mark.parametrize(
    ("work", "given", "limits"),
    [(works.endless, b"", JobLimits(0.2, 1 << 30)), (works.greedy, b"%d" % (200 << 20), JobLimits(60, 100 << 20))],
    ids=["time", "memory"],
)
async def test_job_limit_ends_only_offending_job(work: Any, given: bytes, limits: JobLimits) -> None:
    async with open_pool() as pool:
        ending = asyncio.create_task(run_limited(pool, work, given, limits))
        assert (await run_limited(pool, works.length, b"abc"))[0] == 3
        with pytest.raises(InvalidRequest, match="too much"):
            await ending
        assert (await run_limited(pool, works.length, b"abc"))[0] == 3


async def test_stalled_worker_is_ended_and_busy_worker_finishes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pools, "STALL_SECONDS", 0.3)
    async with open_pool() as pool, asyncio.timeout(60):
        standing = [asyncio.create_task(run_limited(pool, work)) for work in (works.stopped, works.asleep)]
        assert await run_limited(pool, works.busy, b"0.6") == "done", "who computes may take longer"
        for each in standing:
            with pytest.raises(Overloaded, match="hung and was stopped"):
                await each
        assert not pool.num_busy


async def kill_busy_worker(pool: WorkerPool) -> None:
    while not pool._busy_workers:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    (worker,) = pool._busy_workers
    os.kill(worker.pid, signal.SIGKILL)
    while worker in pool._busy_workers:  # noqa: ASYNC110
        await asyncio.sleep(0.01)


async def test_job_of_killed_worker_runs_once_more() -> None:
    async with open_pool() as pool, asyncio.timeout(60):
        job = asyncio.create_task(run_limited(pool, works.busy, b"0.5"))
        await kill_busy_worker(pool)
        assert await job == "done"
        job = asyncio.create_task(run_limited(pool, works.busy, b"0.5"))
        await kill_busy_worker(pool)
        await kill_busy_worker(pool)
        with pytest.raises(Overloaded, match="was killed"):
            await job


async def test_job_runs_once_more_when_fork_server_is_killed_too() -> None:
    """Then no process knows what ended the worker."""
    async with open_pool(launch=Child) as pool, asyncio.timeout(60):
        job = asyncio.create_task(run_limited(pool, works.busy, b"0.5"))
        while not pool._busy_workers:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        assert pool._fork_server is not None
        pool._fork_server.kill()
        await kill_busy_worker(pool)
        assert await job == "done"


async def test_stopped_fork_server_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pools, "STALL_SECONDS", 0.4)
    async with open_pool() as pool, asyncio.timeout(60):
        await pool.start_fork_server()
        assert pool._fork_server is not None
        os.kill(pool._fork_server.pid, signal.SIGSTOP)
        assert (await run_limited(pool, works.length, b"abc"))[0] == 3


@pytest.mark.slow
async def test_fork_server_stopped_during_start_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test sends more than a socket buffer holds, which the stopped process does not read."""
    monkeypatch.setattr(pools, "STALL_SECONDS", 0.4)
    large = replace(SOURCE, sampling_defaults={str(number): 0.0 for number in range(100_000)})
    async with open_pool(large, Child) as pool, asyncio.timeout(60):
        starting = pool.start_fork_server()
        while pool._fork_server is None:  # noqa: ASYNC110
            await asyncio.sleep(0)
        os.kill(pool._fork_server.pid, signal.SIGSTOP)
        assert (await run_limited(pool, works.length, b"abc"))[0] == 3
        assert starting.exception() is not None


async def test_memory_limit_ends_job_in_rust_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """Printing a backtrace would deadlock."""
    monkeypatch.setenv("RUST_BACKTRACE", "1")
    async with open_pool(launch=Child) as pool, asyncio.timeout(60):
        body = b"[" + b",".join([b"[]"] * 1_000_000) + b"]"
        with pytest.raises(InvalidRequest, match="too much"):
            await run_limited(pool, works.nested, body, JobLimits(60, 96 << 20))


@pytest.mark.slow
async def test_worker_with_grown_memory_is_replaced() -> None:
    async with open_pool() as pool:
        first = await run_limited(pool, works.pid)
        assert await run_limited(pool, works.pid, b"x" * (60 << 20)) == first
        await wait_for_exit(first)
        assert await run_limited(pool, works.pid) != first


async def test_cancelled_job_ends_running_worker() -> None:
    async with open_pool() as pool:
        first = await run_limited(pool, works.pid)
        sleeping = asyncio.create_task(run_limited(pool, works.asleep))
        async with asyncio.timeout(30):
            while not pool.num_busy:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        sleeping.cancel()
        with pytest.raises(asyncio.CancelledError):
            await sleeping
        await wait_for_exit(first)
        assert await run_limited(pool, works.pid) != first


async def test_cancelled_waiting_jobs_leave_pool_usable() -> None:
    async with open_pool() as pool:
        sleeping = [asyncio.create_task(run_limited(pool, works.asleep)) for _ in range(20)]
        await asyncio.sleep(0.1)
        for each in sleeping[::-1]:
            each.cancel()
        await asyncio.gather(*sleeping, return_exceptions=True)
        assert (await run_limited(pool, works.length, b"abc"))[0] == 3


async def test_pool_rejects_jobs_over_max_waiting_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pools, "MAX_WAITING_JOBS", 3)
    async with open_pool() as pool:
        sleeping = [asyncio.create_task(run_limited(pool, works.asleep)) for _ in range(20)]
        await asyncio.sleep(0.1)
        rejected = [each for each in sleeping if each.done() and isinstance(each.exception(), Overloaded)]
        assert len(rejected) == 20 - 3 - pool.max_workers
        for each in sleeping:
            each.cancel()
        await asyncio.gather(*sleeping, return_exceptions=True)


@pytest.mark.slow
async def test_killed_fork_server_is_replaced() -> None:
    async with open_pool(launch=Child) as pool:
        first = await run_limited(pool, works.pid)
        assert pool._fork_server is not None
        os.kill(pool._fork_server.pid, signal.SIGKILL)
        os.kill(first, signal.SIGKILL)
        await wait_for_exit(first)
        await asyncio.sleep(0.1)  # so that the end of its socket is read
        assert await run_limited(pool, works.pid) != first
        assert pool._fork_server.returncode is None


async def test_jobs_survive_fork_server_death_during_fork_requests() -> None:
    async with open_pool() as pool:
        await run_limited(pool, works.pid)
        assert pool._fork_server is not None
        os.kill(pool._fork_server.pid, signal.SIGSTOP)
        jobs = [asyncio.create_task(run_limited(pool, works.pid)) for _ in range(pool.max_workers)]
        await asyncio.sleep(0.1)
        os.kill(pool._fork_server.pid, signal.SIGKILL)
        assert len(await asyncio.gather(*jobs)) == pool.max_workers


async def test_cancelled_jobs_request_few_workers() -> None:
    """Otherwise the event loop would block forever on the full socket of a fork server that is slow to fork."""
    async with open_pool() as pool:
        await run_limited(pool, works.pid)
        assert pool._fork_server is not None
        os.kill(pool._fork_server.pid, signal.SIGSTOP)
        for _ in range(1000):
            leaving = [asyncio.create_task(run_limited(pool, works.pid)) for _ in range(pool.max_workers + 1)]
            for _ in range(3):
                await asyncio.sleep(0)
            for each in leaving:
                each.cancel()
            await asyncio.gather(*leaving, return_exceptions=True)
        os.kill(pool._fork_server.pid, signal.SIGCONT)
        assert await run_limited(pool, works.pid)
        assert len(pool.worker_pids) <= 2 * pool.max_workers


async def test_fork_server_that_cannot_start_raises_engine_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    async with open_pool(launch=Child) as pool:
        with pytest.raises(EngineError):
            await run_limited(pool, works.pid)


async def test_fail_jobs_fails_waiting_running_and_later_jobs() -> None:
    async with open_pool() as pool:
        sleeping = [asyncio.create_task(run_limited(pool, works.asleep)) for _ in range(5)]
        async with asyncio.timeout(30):
            while pool.num_busy < pool.max_workers:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert pool.num_jobs == 5
        pool.fail_jobs(Overloaded("the end"))
        for each in sleeping:
            with pytest.raises(Overloaded, match="the end"):
                await each
        assert pool.num_jobs == 0
        with pytest.raises(Overloaded, match="the end"):
            await run_limited(pool, works.pid)
