"""Writes of the store run in threads, one at a time per owner."""

from __future__ import annotations

import asyncio
import threading

import pytest

from quire.server.store.owner_executor import OwnerExecutor


async def test_cancelled_write_blocks_next_write_of_owner_until_done() -> None:
    threads, began, may_end, order = OwnerExecutor(), threading.Event(), threading.Event(), list[str]()

    def first() -> None:
        began.set()
        may_end.wait()
        order.append("first")

    caller = asyncio.create_task(threads.run_for_owner("a", first))
    await asyncio.to_thread(began.wait)
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    second = asyncio.create_task(threads.run_for_owner("a", order.append, "second"))
    await threads.run_for_owner("b", order.append, "another owner's")
    may_end.set()
    await second
    assert order == ["another owner's", "first", "second"]
    threads.pool.shutdown()


async def test_failed_write_does_not_block_next_write_of_owner() -> None:
    threads = OwnerExecutor()
    with pytest.raises(ZeroDivisionError):
        await threads.run_for_owner("a", lambda: 1 / 0)
    assert await threads.run_for_owner("a", lambda: 5) == 5
    threads.pool.shutdown()
