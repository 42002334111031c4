"""Every queue that API keys share is fair. A user saw: while one key had 1,300 open calls, 67 of 76 requests of another
key got a 503 (issue 56, item 3).
"""

from __future__ import annotations

import asyncio
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from quire.engine.common.errors import Overloaded
from quire.server.access.admission import Admission
from quire.server.access.fair_semaphore import FairSemaphore
from quire.server.access.rate_limits import RateLimits
from quire.server.access.tenants import Tenant
from quire.server.config import ServerConfig
from quire.server.workers import pool as pools
from tests.server.workers import works
from tests.server.workers.test_pool import open_pool


def tenant(name: str) -> Tenant:
    return Tenant(name, name.encode(), RateLimits(None, None))


async def start_jobs(pool: pools.WorkerPool, name: str, count: int) -> list[asyncio.Task[Any]]:
    """Start jobs of a tenant that sleep or wait for a worker."""
    limits = pools.JobLimits(cpu_seconds=5, memory_bytes=pools.WORKER_MEMORY_BYTES)
    wrong = pools.InvalidRequest("too much")
    jobs = [pool.run_limited_job(limits, works.asleep, [b""], tenant(name), wrong, is_slow=False) for _ in range(count)]
    tasks = [asyncio.create_task(each) for each in jobs]
    await asyncio.sleep(0.05)
    return tasks


def num_refused(tasks: list[asyncio.Task[Any]]) -> int:
    return sum(each.done() and isinstance(each.exception(), Overloaded) for each in tasks)


@pytest.mark.parametrize(("crowd", "room"), [("a", 6), ("", 12)])
async def test_worker_pool_queue_limits_share_of_each_key(
    monkeypatch: pytest.MonkeyPatch, crowd: str, room: int
) -> None:
    """Without keys all callers count as one."""
    monkeypatch.setattr(pools, "MAX_WAITING_JOBS", 12)
    async with open_pool() as pool:
        first = await start_jobs(pool, crowd, 40)
        assert num_refused(first) == 40 - room - pool.max_workers
        others = [await start_jobs(pool, name, 2) for name in ("b", "c")] if crowd else []
        assert not any(map(num_refused, others))
        every = [*first, *(each for some in others for each in some)]
        for each in every:
            each.cancel()
        await asyncio.gather(*every, return_exceptions=True)
        again = await start_jobs(pool, crowd, 5 + pool.max_workers)
        assert num_refused(again) == 0, "who has left takes no place"
        for each in again:
            each.cancel()
        await asyncio.gather(*again, return_exceptions=True)


def test_admission_limits_each_keys_share_of_queued_prompt_tokens() -> None:
    """A key whose prompts take half of the queue gets no more, and other keys do."""
    client: Any = SimpleNamespace(refusing=False, queued_tokens=0, num_open=0, num_open_of=lambda name: 0)
    config = ServerConfig(max_num_seqs=2, max_queued_tokens=1000)
    admission = Admission(client, config, context_length=10_000, has_api_keys=True)

    def admit(name: str, tokens: int) -> None:
        admission.admit_generation(tenant(name), num_prompts=1, prompt_tokens=tokens, n=1, max_tokens=1, priority=0)
        client.queued_tokens += tokens

    for _ in range(5):
        admit("a", 100)
    with pytest.raises(Overloaded, match="prompt tokens are waiting"):
        admit("a", 100)
    admit("b", 200)
    admit("c", 100)
    with pytest.raises(Overloaded):
        admit("b", 200)


async def test_fair_semaphore_serves_owner_with_fewest_slots_first() -> None:
    turns, order = FairSemaphore(1), list[str]()

    async def job(owner: str) -> None:
        async with turns.hold_slot(owner):
            order.append(owner)
            await asyncio.sleep(0)

    async with turns.hold_slot("a"):
        crowd = [asyncio.create_task(job("a")) for _ in range(50)]
        await asyncio.sleep(0)
        late = asyncio.create_task(job("b"))
        await asyncio.sleep(0)
    await late
    assert order.index("b") <= 1
    await asyncio.gather(*crowd)
    assert Counter(order) == {"a": 50, "b": 1}


async def test_fair_semaphore_reserves_half_of_slots_for_other_owners() -> None:
    turns = FairSemaphore(8, reserves_for_others=True)
    crowd = [asyncio.create_task(turns.acquire_slot("a")) for _ in range(20)]
    await asyncio.sleep(0)
    assert sum(each.done() for each in crowd) == 4
    await asyncio.wait_for(turns.acquire_slot("b"), 1)
    for each in crowd[4:]:
        each.cancel()
    await asyncio.gather(*crowd, return_exceptions=True)
    for _ in range(4):
        turns.release_slot("a")
    everybody = FairSemaphore(8, reserves_for_others=True)
    await asyncio.wait_for(asyncio.gather(*(everybody.acquire_slot("") for _ in range(8))), 1)


async def test_fair_semaphore_passes_slot_of_cancelled_waiter_to_next() -> None:
    turns = FairSemaphore(1)
    await turns.acquire_slot("a")
    leaving, staying = asyncio.create_task(turns.acquire_slot("b")), asyncio.create_task(turns.acquire_slot("c"))
    await asyncio.sleep(0)
    leaving.cancel()
    turns.release_slot("a")
    await asyncio.wait_for(staying, 1)
    turns.release_slot("c")
    await asyncio.wait_for(turns.acquire_slot("a"), 1)
