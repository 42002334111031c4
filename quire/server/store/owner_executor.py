"""Threads for slow operations, so that many calls of one API key do not delay other keys' first tokens."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

NUM_THREADS = 2
Result = TypeVar("Result")


class OwnerExecutor:
    """Runs slow operations. Short ones use asyncio's threads. `run_for_owner` must be called in an event loop."""

    def __init__(self) -> None:
        self.pool = ThreadPoolExecutor(NUM_THREADS, "store")
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}

    async def run_for_owner(self, owner: str, function: Callable[..., Result], *args: object) -> Result:
        """Runs one call per owner at a time, in order. A call completes even if its caller is cancelled."""
        loop = asyncio.get_running_loop()
        await self._wait_for_turn(owner, loop)
        call = loop.run_in_executor(self.pool, function, *args)
        call.add_done_callback(lambda _: self._pass_turn(owner))
        return await asyncio.shield(call)

    async def _wait_for_turn(self, owner: str, loop: asyncio.AbstractEventLoop) -> None:
        if owner not in self._waiting:
            self._waiting[owner] = deque()
            return
        turn = loop.create_future()
        self._waiting[owner].append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # cancelled just after getting its turn
                self._pass_turn(owner)
            raise

    def _pass_turn(self, owner: str) -> None:
        waiting = self._waiting[owner]
        while waiting:
            turn = waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                return
        del self._waiting[owner]
