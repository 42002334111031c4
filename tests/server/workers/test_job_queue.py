"""The job queue is fair among tenants, prefers small jobs, never gives all slots to large ones, and starves no job."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.server.access.rate_limits import RateLimits
from quire.server.access.tenants import Tenant
from quire.server.workers.job_queue import LARGE_BYTES, JobQueue, WorkerSlotClaim
from tests.machine import set_clock


def tenant(name: str, weight: float = 1.0) -> Tenant:
    return Tenant(name, b"", RateLimits(None, None), weight)


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    set_clock(monkeypatch, monotonic=clock)
    return clock


def make_claim(of: Tenant, clock: Callable[[], float], size: int = 1) -> WorkerSlotClaim:
    return WorkerSlotClaim(of, size, asyncio.get_running_loop().create_future(), arrived_at=clock())


async def run_all_jobs(
    queue: JobQueue, clock: Clock, turns: list[WorkerSlotClaim], seconds: Callable[[WorkerSlotClaim], float]
) -> list[WorkerSlotClaim]:
    """Run all claims and return them in the order of their grants; each takes `seconds`."""
    for each in turns:
        queue.add_job(each)
    order: list[WorkerSlotClaim] = []
    running: dict[WorkerSlotClaim, float] = {}
    while len(order) < len(turns) or running:
        for each in turns:
            if each.grant_future.done() and each not in order:
                order.append(each)
                running[each] = clock.now + seconds(each)
        first = min(running, key=lambda each: running[each])
        clock.now = max(clock.now, running.pop(first))
        queue.end_job(first)
    return order


async def test_job_queue_shares_slots_equally_among_tenants(clock: Clock) -> None:
    many, few = tenant("many"), tenant("few")
    turns = [make_claim(many, clock) for _ in range(50)] + [make_claim(few, clock) for _ in range(5)]
    order = await run_all_jobs(JobQueue(1), clock, turns, lambda each: 1.0)
    places = [place for place, each in enumerate(order) if each.tenant is few]
    assert places[-1] <= 2 * 5


async def test_job_queue_shares_follow_tenant_weights(clock: Clock) -> None:
    heavy, light = tenant("heavy", 3.0), tenant("light", 1.0)
    turns = [make_claim(each, clock) for each in (heavy, light) for _ in range(40)]
    order = await run_all_jobs(JobQueue(1), clock, turns, lambda each: 1.0)
    first = Counter(each.tenant.name for each in order[:40])
    assert 28 <= first["heavy"] <= 32


async def test_job_queue_counts_worker_seconds_not_jobs(clock: Clock) -> None:
    slow, quick = tenant("slow"), tenant("quick")
    turns = [make_claim(slow, clock) for _ in range(10)] + [make_claim(quick, clock) for _ in range(100)]
    order = await run_all_jobs(JobQueue(1), clock, turns, lambda each: 10.0 if each.tenant is slow else 1.0)
    assert 4 <= sum(each.tenant is slow for each in order[:55]) <= 6


async def test_job_queue_prefers_small_jobs_without_starving_large_ones(clock: Clock) -> None:
    one = tenant("one")
    queue = JobQueue(1)
    queue.add_job(blocker := make_claim(one, clock))
    large = make_claim(one, clock, size=900_000)
    queue.add_job(large)
    numbers = count()
    while not large.grant_future.done():
        queue.add_job(small := make_claim(one, clock, size=100))
        clock.now += 0.1
        queue.end_job(blocker)
        blocker = small
        assert next(numbers) < 20, "a large one waits as long as its bytes say"
        if not small.grant_future.done():
            break
    assert large.grant_future.done()


@given(
    st.integers(1, 8),
    st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from([1, LARGE_BYTES + 1]), st.booleans()), max_size=40),
)
def test_job_queue_never_exceeds_slots_and_grants_every_job(slots: int, jobs: list[tuple[str, int, bool]]) -> None:
    async def run() -> None:
        queue, open_turns = JobQueue(slots), list[WorkerSlotClaim]()
        tenants = {name: tenant(name) for name in "abc"}
        for name, size, ends_one in jobs:
            each = WorkerSlotClaim(tenants[name], size, asyncio.get_running_loop().create_future())
            open_turns.append(each)
            queue.add_job(each)
            if ends_one:  # running or not: waiting callers leave too
                queue.end_job(open_turns.pop(0))
            running = [each for each in open_turns if each.grant_future.done()]
            assert len(running) <= slots
            assert sum(each.is_large for each in running) <= max(1, slots - 1)
            free = len(running) < slots and sum(each.is_large for each in running) < max(1, slots - 1)
            assert not (free and len(running) < len(open_turns)), "a slot is free while somebody waits"
        while open_turns:
            granted = [each for each in open_turns if each.grant_future.done()]
            assert granted
            queue.end_job(granted[0])
            open_turns.remove(granted[0])
        assert len(queue) == 0
        leftover = [*queue._seconds_by_tenant, *queue._seconds_by_class, *queue._num_jobs]
        assert not leftover, "of tenants that are gone, nothing is kept"

    asyncio.run(run())


async def test_job_queue_classes_do_not_block_each_other(clock: Clock) -> None:
    """Also if all callers are one tenant, as on a server without keys."""
    queue, anybody = JobQueue(2), tenant("")
    grammars = [make_claim(anybody, clock) for _ in range(50)]
    for each in grammars:
        each.is_slow = True
    prompts = [make_claim(anybody, clock, 1 << 20) for _ in range(50)]
    honest = make_claim(anybody, clock, 9000)
    order = await run_all_jobs(
        queue, clock, [*grammars, *prompts, honest], lambda each: 0.01 if each is honest else 2.0
    )
    assert order.index(honest) <= 2
    half = order[:50]
    assert abs(sum(each.is_slow for each in half) - 25) <= 1, "both kinds go on"
