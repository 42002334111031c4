"""Threads for what takes long in the store, so that one key's crowd takes no thread from other keys' first tokens."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

NUM_THREADS = 2
Result = TypeVar("Result")


class OwnerExecutor:
    """Beside asyncio's own threads, in which all that is short is done. `run_for_owner` is the event loop's."""

    def __init__(self) -> None:
        self.pool = ThreadPoolExecutor(NUM_THREADS, "store")
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}
        """By owner: who waits while another call of the owner goes on."""

    async def run_for_owner(self, owner: str, function: Callable[..., Result], *args: object) -> Result:
        """What the function returns, called in a thread: one call of an owner at a time, in their order. A call goes on
        when its caller is cancelled, and the owner's next one waits for its end all the same."""
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
            if turn.done() and not turn.cancelled():  # it had just got its turn
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
