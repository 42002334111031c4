"""Workers: the same results as here, limits that end them, and nothing of one job that the next could notice."""

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
def works_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


@asynccontextmanager
async def open_pool(source: ServedModelSpec = SOURCE, launch: LaunchProcess = FORKED) -> AsyncIterator[WorkerPool]:
    """`launch`: by Child the process that forks is started as a server starts it, with all its imports."""
    pool = WorkerPool(source, launch_process=launch)
    try:
        yield pool
    finally:
        await pool.close()


async def isolated(pool: WorkerPool, work: Any, given: bytes = b"", limits: JobLimits = PLENTY) -> Any:
    return await pool.run_limited_job(limits, work, [given], ANYBODY, TOO_MUCH, is_slow=False)


async def gone(pid: int) -> None:
    async with asyncio.timeout(30):
        while Path(f"/proc/{pid}").exists():  # noqa: ASYNC110, ASYNC240
            await asyncio.sleep(0.01)


async def test_work_is_done_elsewhere_and_a_worker_stays() -> None:
    async with open_pool(launch=Child) as pool:
        assert pool.worker_pids == []
        there = await pool.run_job(works.pid, [b"x"], ANYBODY)
        assert there != os.getpid()
        assert pool.worker_pids == [there]
        assert await pool.run_job(works.pid, [b"x" * 5000], ANYBODY) == there


async def test_a_body_comes_over_whole() -> None:
    async with open_pool() as pool:
        given = "".join(chr(1000 + i % 5000) for i in range(300_000)).encode()
        pieces = [given[:1], given[1:70_000], b"", given[70_000:]]
        here = works.length(given, MODEL, SOURCE.config)
        assert await pool.run_job(works.length, pieces, ANYBODY) == (*here[:2], True)


async def test_errors_come_back_as_they_are() -> None:
    async with open_pool() as pool:
        with pytest.raises(ContextLengthExceeded) as raised:
            await isolated(pool, works.refusal)
        assert (raised.value.message, raised.value.param) == ("too long", "prompt")
        with pytest.raises(RuntimeError, match=r"works\.py(.|\n)*LookupError: our own mistake"):
            await isolated(pool, works.mistake)


async def test_workers_do_not_know_the_keys() -> None:
    async with open_pool(launch=Child) as pool:
        assert await isolated(pool, works.keys) == []


@pytest.mark.parametrize(
    ("work", "given", "limits"),
    [(works.endless, b"", JobLimits(0.2, 1 << 30)), (works.greedy, b"%d" % (200 << 20), JobLimits(60, 100 << 20))],
    ids=["time", "memory"],
)
async def test_a_limit_ends_the_work_alone(work: Any, given: bytes, limits: JobLimits) -> None:
    async with open_pool() as pool:
        ending = asyncio.create_task(isolated(pool, work, given, limits))
        assert (await isolated(pool, works.length, b"abc"))[0] == 3
        with pytest.raises(InvalidRequest, match="too much"):
            await ending
        assert (await isolated(pool, works.length, b"abc"))[0] == 3


async def test_a_worker_that_stands_still_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pools, "STALL_SECONDS", 0.3)
    async with open_pool() as pool, asyncio.timeout(60):
        standing = [asyncio.create_task(isolated(pool, work)) for work in (works.stopped, works.asleep)]
        assert await isolated(pool, works.busy, b"0.6") == "done", "who computes may take longer"
        for each in standing:
            with pytest.raises(Overloaded, match="stood still"):
                await each
        assert not pool.num_busy


async def test_a_stopped_process_that_forks_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pools, "STALL_SECONDS", 0.4)
    async with open_pool() as pool, asyncio.timeout(60):
        await pool.start_fork_server()
        assert pool._fork_server is not None
        os.kill(pool._fork_server.pid, signal.SIGSTOP)
        assert (await isolated(pool, works.length, b"abc"))[0] == 3


@pytest.mark.slow
async def test_a_process_that_is_stopped_while_it_starts_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """More than a socket's buffer is sent to it, which it does not read."""
    monkeypatch.setattr(pools, "STALL_SECONDS", 0.4)
    large = replace(SOURCE, sampling_defaults={str(number): 0.0 for number in range(100_000)})
    async with open_pool(large, Child) as pool, asyncio.timeout(60):
        starting = pool.start_fork_server()
        while pool._fork_server is None:  # noqa: ASYNC110
            await asyncio.sleep(0)
        os.kill(pool._fork_server.pid, signal.SIGSTOP)
        assert (await isolated(pool, works.length, b"abc"))[0] == 3
        assert starting.exception() is not None


async def test_rust_code_ends_where_memory_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a backtrace it would wait for itself."""
    monkeypatch.setenv("RUST_BACKTRACE", "1")
    async with open_pool(launch=Child) as pool, asyncio.timeout(60):
        given = b"[" + b",".join([b"[]"] * 1_000_000) + b"]"
        with pytest.raises(InvalidRequest, match="too much"):
            await isolated(pool, works.nested, given, JobLimits(60, 96 << 20))


@pytest.mark.slow
async def test_a_worker_that_has_grown_is_replaced() -> None:
    async with open_pool() as pool:
        first = await isolated(pool, works.pid)
        assert await isolated(pool, works.pid, b"x" * (60 << 20)) == first
        await gone(first)
        assert await isolated(pool, works.pid) != first


async def test_who_leaves_takes_his_worker_with_him() -> None:
    async with open_pool() as pool:
        first = await isolated(pool, works.pid)
        sleeping = asyncio.create_task(isolated(pool, works.asleep))
        async with asyncio.timeout(30):
            while not pool.num_busy:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        sleeping.cancel()
        with pytest.raises(asyncio.CancelledError):
            await sleeping
        await gone(first)
        assert await isolated(pool, works.pid) != first


async def test_who_leaves_while_he_waits_leaves_nothing_behind() -> None:
    async with open_pool() as pool:
        sleeping = [asyncio.create_task(isolated(pool, works.asleep)) for _ in range(20)]
        await asyncio.sleep(0.1)
        for each in sleeping[::-1]:
            each.cancel()
        await asyncio.gather(*sleeping, return_exceptions=True)
        assert (await isolated(pool, works.length, b"abc"))[0] == 3


async def test_no_more_wait_than_are_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pools, "MAX_WAITING_JOBS", 3)
    async with open_pool() as pool:
        sleeping = [asyncio.create_task(isolated(pool, works.asleep)) for _ in range(20)]
        await asyncio.sleep(0.1)
        refused = [each for each in sleeping if each.done() and isinstance(each.exception(), Overloaded)]
        assert len(refused) == 20 - 3 - pool.max_workers
        for each in sleeping:
            each.cancel()
        await asyncio.gather(*sleeping, return_exceptions=True)


@pytest.mark.slow
async def test_the_process_that_forks_may_die_too() -> None:
    async with open_pool(launch=Child) as pool:
        first = await isolated(pool, works.pid)
        assert pool._fork_server is not None
        os.kill(pool._fork_server.pid, signal.SIGKILL)
        os.kill(first, signal.SIGKILL)
        await gone(first)
        await asyncio.sleep(0.1)  # its socket's end is read
        assert await isolated(pool, works.pid) != first
        assert pool._fork_server.returncode is None


async def test_the_process_that_forks_dies_while_it_is_asked() -> None:
    async with open_pool(launch=Child) as pool:
        await isolated(pool, works.pid)
        assert pool._fork_server is not None
        os.kill(pool._fork_server.pid, signal.SIGSTOP)
        asked = [asyncio.create_task(isolated(pool, works.pid)) for _ in range(pool.max_workers)]
        await asyncio.sleep(0.1)
        os.kill(pool._fork_server.pid, signal.SIGKILL)
        assert len(await asyncio.gather(*asked)) == pool.max_workers


async def test_those_who_leave_ask_for_few_workers() -> None:
    """The event loop would wait for ever where the socket to a process that is slow to fork is full."""
    async with open_pool() as pool:
        await isolated(pool, works.pid)
        assert pool._fork_server is not None
        os.kill(pool._fork_server.pid, signal.SIGSTOP)
        for _ in range(1000):
            leaving = [asyncio.create_task(isolated(pool, works.pid)) for _ in range(pool.max_workers + 1)]
            for _ in range(3):
                await asyncio.sleep(0)
            for each in leaving:
                each.cancel()
            await asyncio.gather(*leaving, return_exceptions=True)
        os.kill(pool._fork_server.pid, signal.SIGCONT)
        assert await isolated(pool, works.pid)
        assert len(pool.worker_pids) <= 2 * pool.max_workers


async def test_a_process_that_cannot_start_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    async with open_pool(launch=Child) as pool:
        with pytest.raises(EngineError):
            await isolated(pool, works.pid)


async def test_all_processes_end_with_the_pool() -> None:
    async with open_pool(launch=Child) as pool:
        pids = [await isolated(pool, works.pid)]
        sleeping = asyncio.create_task(isolated(pool, works.asleep))
        await asyncio.sleep(0.2)
        assert pool._fork_server is not None
        pids += [pool._fork_server.pid, *pool.worker_pids]
    for pid in pids:
        await gone(pid)
    with pytest.raises(InvalidRequest):
        await sleeping


async def test_what_waits_and_what_runs_is_given_up_when_the_server_ends() -> None:
    async with open_pool() as pool:
        sleeping = [asyncio.create_task(isolated(pool, works.asleep)) for _ in range(5)]
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
            await isolated(pool, works.pid)
