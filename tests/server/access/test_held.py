"""What requests hold until they are answered: counted once, within a budget, fair among keys, given back in the end."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from starlette.types import Message, Receive, Scope, Send

from quire.engine.errors import Overloaded
from quire.server.access.bodies import FREE_BYTES
from quire.server.access.held import HeldMiddleware, Hold, hold
from quire.server.access.rate_limits import RateLimits
from quire.server.access.tenants import Tenant
from quire.server.budget import Budget

MIB = 1 << 20


def test_small_holds_are_free_until_they_are_not() -> None:
    budget = Budget(MIB)
    one, other = Hold(budget, ""), Hold(budget, "")
    one.grow(FREE_BYTES)
    assert budget.held == 0
    one.grow(1)
    assert budget.held == FREE_BYTES + 1
    with pytest.raises(Overloaded):
        other.grow(MIB)
    other.grow(FREE_BYTES)
    one.end()
    assert budget.held == 0
    other.grow(2 * MIB)
    assert budget.held == 2 * MIB + FREE_BYTES, "one hold always fits"
    with pytest.raises(Overloaded):
        one.grow(FREE_BYTES + 1)
    other.end()
    assert budget.held == 0


def test_what_goes_on_without_a_connection_counts_whole() -> None:
    budget = Budget(MIB)
    one = Hold(budget, "")
    one.grow(100)
    moved = one.moved()
    assert budget.held == 100
    one.end()
    assert budget.held == 100
    moved.end()
    assert budget.held == 0


def test_a_key_leaves_as_much_to_others() -> None:
    budget = Budget(8 * MIB)
    greedy = [Hold(budget, "greedy") for _ in range(5)]
    for each in greedy[:4]:
        each.grow(MIB)
    with pytest.raises(Overloaded):
        greedy[4].grow(MIB)
    for owner in ("a", "b"):
        Hold(budget, owner).grow(MIB)


async def test_an_answer_is_held_until_its_reader_has_it() -> None:
    budget, read, sent = Budget(8 * MIB), asyncio.Event(), list[Message]()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        hold(scope, 2 * FREE_BYTES)
        await send({"type": "http.response.start", "status": 200})
        await send({"type": "http.response.body", "body": b"x"})

    async def send(message: Message) -> None:
        if sent and sent[-1].get("body"):
            await read.wait()
        sent.append(message)

    async def receive() -> Message:
        raise AssertionError

    scope: Any = {"type": "http", "tenant": Tenant("", b"", RateLimits(None, None))}
    answering = asyncio.create_task(HeldMiddleware(app, budget)(scope, receive, send))
    await asyncio.sleep(0.01)
    assert (sent[-1]["body"], budget.held) == (b"x", 2 * FREE_BYTES)
    read.set()
    await answering
    assert [message.get("more_body", False) for message in sent] == [False, True, False]
    assert budget.held == 0
