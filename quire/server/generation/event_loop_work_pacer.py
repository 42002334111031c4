from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import ParamSpec, TypeVar

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


class EventLoopWorkPacer:
    """`async with pacer:` runs one block per turn of the event loop."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self._executor = ThreadPoolExecutor(1, "turns")

    async def __aenter__(self) -> None:
        await self._lock.acquire()
        try:
            await asyncio.sleep(0)
        except asyncio.CancelledError:
            self._lock.release()
            raise

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lock.release()

    async def run_in_thread(
        self, work: Callable[Parameters, Result], *args: Parameters.args, **options: Parameters.kwargs
    ) -> Result:
        """Runs one longer piece of work at a time, so that threads do not compete with the event loop for the GIL."""
        return await asyncio.get_running_loop().run_in_executor(self._executor, lambda: work(*args, **options))

    def close(self) -> None:
        self._executor.shutdown(wait=False, cancel_futures=True)
