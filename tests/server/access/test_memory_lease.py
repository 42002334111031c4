"""Memory leases: each request's bytes count once against the budget, are shared fairly among keys, and are released."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from starlette.types import Message, Receive, Scope, Send

from quire.engine.common.errors import Overloaded
from quire.server.access.body_reader import UNCOUNTED_BYTES
from quire.server.access.memory_lease import MemoryLease, MemoryLeaseMiddleware, grow_request_lease
from quire.server.access.rate_limits import RateLimits
from quire.server.access.tenants import Tenant
from quire.server.shared_capacity import SharedCapacity

MIB = 1 << 20


def test_memory_lease_counts_only_above_uncounted_bytes() -> None:
    budget = SharedCapacity(MIB)
    one, other = MemoryLease(budget, ""), MemoryLease(budget, "")
    one.grow_lease(UNCOUNTED_BYTES)
    assert budget.total_used == 0
    one.grow_lease(1)
    assert budget.total_used == UNCOUNTED_BYTES + 1
    with pytest.raises(Overloaded):
        other.grow_lease(MIB)
    other.grow_lease(UNCOUNTED_BYTES)
    one.release_lease()
    assert budget.total_used == 0
    other.grow_lease(2 * MIB)
    assert budget.total_used == 2 * MIB + UNCOUNTED_BYTES, "one hold always fits"
    with pytest.raises(Overloaded):
        one.grow_lease(UNCOUNTED_BYTES + 1)
    other.release_lease()
    assert budget.total_used == 0


def test_moved_lease_counts_small_sizes() -> None:
    budget = SharedCapacity(MIB)
    one = MemoryLease(budget, "")
    one.grow_lease(100)
    moved = one.move_to_new_lease()
    assert budget.total_used == 100
    one.release_lease()
    assert budget.total_used == 100
    moved.release_lease()
    assert budget.total_used == 0


def test_leases_of_one_key_leave_capacity_to_others() -> None:
    budget = SharedCapacity(8 * MIB)
    greedy = [MemoryLease(budget, "greedy") for _ in range(5)]
    for each in greedy[:4]:
        each.grow_lease(MIB)
    with pytest.raises(Overloaded):
        greedy[4].grow_lease(MIB)
    for owner in ("a", "b"):
        MemoryLease(budget, owner).grow_lease(MIB)


async def test_response_lease_lasts_until_client_reads_response() -> None:
    budget, read, sent = SharedCapacity(8 * MIB), asyncio.Event(), list[Message]()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        grow_request_lease(scope, 2 * UNCOUNTED_BYTES)
        await send({"type": "http.response.start", "status": 200})
        await send({"type": "http.response.body", "body": b"x"})

    async def send(message: Message) -> None:
        if sent and sent[-1].get("body"):
            await read.wait()
        sent.append(message)

    async def receive() -> Message:
        raise AssertionError

    scope: Any = {"type": "http", "tenant": Tenant("", b"", RateLimits(None, None))}
    answering = asyncio.create_task(MemoryLeaseMiddleware(app, budget)(scope, receive, send))
    await asyncio.sleep(0.01)
    assert (sent[-1]["body"], budget.total_used) == (b"x", 2 * UNCOUNTED_BYTES)
    read.set()
    await answering
    assert [message.get("more_body", False) for message in sent] == [False, True, False]
    assert budget.total_used == 0
