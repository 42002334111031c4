"""The engine inside the caller's process: for offline use (`LLM`) and for tests.

Steps run on the event loop, which does nothing else while a step is computed.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Sequence
from typing import TYPE_CHECKING

from quire.engine.client.client import EngineClient
from quire.engine.config import EngineConfig
from quire.engine.types import EngineInfo, Request

if TYPE_CHECKING:
    from quire.engine.loop import Engine


class InProcessClient(EngineClient):
    """Runs an engine in a task of the current event loop."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__()
        self._config = config
        self._engine: Engine | None = None
        self._work = asyncio.Event()
        """Set when there may be something to compute."""
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> EngineInfo:
        # This imports torch, which no module of the control half may import at its top.
        from quire.engine.loop import Engine

        self._engine = Engine(self._config)
        self.stats = self._engine.stats
        self._task = asyncio.create_task(self._run(self._engine))
        return self._engine.info

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self._fail("the engine was stopped")
        self._engine = self._task = None
        gc.collect()  # the engine contains reference cycles: without this its memory would be freed much later

    def _send(self, requests: Sequence[Request]) -> None:
        assert self._engine is not None, "start() comes first"
        for request in requests:
            self._engine.add(request)
        self._work.set()

    def _send_abort(self, request_id: str) -> None:
        assert self._engine is not None
        self._engine.abort(request_id)
        self._work.set()

    def _send_snapshot_request(self) -> None:
        assert self._engine is not None
        self._on_snapshot(self._engine.snapshot())

    async def _run(self, engine: Engine) -> None:
        while True:
            self._work.clear()
            try:
                outputs = engine.step()
            except Exception as error:
                self._fail(f"the engine failed: {type(error).__name__}: {error}")
                raise
            self._deliver(outputs, engine.stats, engine.last_step)
            if engine.busy:
                await asyncio.sleep(0)
            else:
                await self._work.wait()
