"""The engine inside the caller's process: for offline use (`LLM`) and for tests.

Steps run on the event loop, which does nothing else while a step is computed.
"""

from __future__ import annotations

import asyncio
import gc
import traceback
from collections.abc import Sequence
from typing import TYPE_CHECKING

from quire.engine.checkpoint.kv_folder import forget_pages
from quire.engine.client.client import EngineClient
from quire.engine.client.journal import Journal
from quire.engine.config import EngineConfig
from quire.engine.errors import ConfigError
from quire.engine.stats import EngineStats
from quire.engine.types import EngineInfo, Request, RequestOutput

if TYPE_CHECKING:
    from quire.engine.loop import Engine, Tensors


class InProcessClient(EngineClient):
    """Runs an engine in a task of the current event loop."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__()
        self._config = config
        self._engine: Engine | None = None
        self._journal = Journal()
        self._work = asyncio.Event()
        """Set when there may be something to compute."""
        self._task: asyncio.Task[None] | None = None
        self._fitted: dict[str, int] = {}
        """What the first engine found that the memory allows, by configuration key."""
        self._given = False
        """Whether the weights are in no file, but were given as tensors."""
        self._earlier_stats = EngineStats()
        """Counters added up over the engines before this one."""

    async def start(self) -> EngineInfo:
        # This imports torch, which no module of the control half may import at its top.
        from quire.engine.loop import Engine

        engine = Engine(self._config)
        self._fitted = {"max_model_len": engine.info.max_model_len, "num_kv_blocks": engine.info.num_blocks}
        self._begin(engine)
        return engine.info

    async def stop(self) -> None:
        await self._let_go()
        self._fail("the engine was stopped")
        gc.collect()  # the engine contains reference cycles: without this its memory would be freed much later

    async def rest(self, level: int) -> None:
        """Both levels are one here: there is no process that could end."""
        self.asleep = True
        await self._let_go()

    async def check(self, weights: str) -> None:
        if self._engine is not None:
            self._engine.check_weights(self._with(weights))

    async def load(self, weights: str | None, version: str) -> None:
        if weights is None and self._given:
            raise ConfigError("the weights that slept are in no file: load_weights gives them, and wakes the model")
        if weights is not None:
            await self.check(weights)
        await self._build(self._with(weights), version)

    def _with(self, weights: str | None) -> EngineConfig:
        update = {} if weights is None else {"weights": weights, "load_format": "auto"}
        return self._config.model_copy(update=self._fitted | update)

    async def load_tensors(self, tensors: Tensors, version: str) -> None:
        """As `load`, with weights that are in memory, under their names in the checkpoint. Where that fails, the
        weights before are back if a file has them; if not, the model sleeps until some are given."""
        config = self._config.model_copy(update=self._fitted | {"load_format": "auto"})
        await self._build(config, version, tensors)

    async def _build(self, config: EngineConfig, version: str, tensors: Tensors | None = None) -> None:
        from quire.engine.loop import Engine, let_go

        if self._failure is not None:
            raise self._failure
        before = None if self.asleep or self._given else self._config
        self.asleep = True
        await self._let_go()
        try:
            engine = Engine(config, tensors=tensors)
        except Exception as error:
            traceback.clear_frames(error.__traceback__)  # what was loaded is in them
            let_go()
            if before is not None:
                self._begin(Engine(before.model_copy(update=self._fitted)))
            raise
        self._config, self._given, self.weights_version = config, tensors is not None, version
        self._begin(engine)

    def _begin(self, engine: Engine) -> None:
        """Compute with this engine, and go on with what is open."""
        self._engine, self.asleep = engine, False
        self.stats = engine.stats.after(self._earlier_stats)
        for request in self._journal.requests():
            engine.add(request)
        self._task = asyncio.create_task(self._run(engine))

    async def _let_go(self) -> None:
        """Free the engine, if there is one. Open requests stay."""
        task, engine, self._task, self._engine = self._task, self._engine, None, None
        if task is None or engine is None:
            return
        from quire.engine.loop import let_go

        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        engine.close()
        del task, engine  # the task's frame holds the engine too
        self._on_snapshot(None)
        self.history.engine_died()
        self._earlier_stats = self.stats = self.stats.without_gauges()
        let_go()

    def _send(self, requests: Sequence[Request]) -> None:
        for request in requests:
            self._journal.open(request)
            if self._engine is not None:
                self._engine.add(request)
        self._work.set()

    def _send_abort(self, request_id: str) -> None:
        self._journal.close(request_id)
        if self._engine is not None:
            self._engine.abort(request_id)
        self._work.set()

    def _send_snapshot_request(self) -> None:
        assert self._engine is not None, "ask while it is responsive"
        self._on_snapshot(self._engine.snapshot())

    def reset_prefix_cache(self) -> None:
        if self._engine is not None:
            self._engine.reset_prefix_cache()
        elif self._config.kv_offload_dir is not None:
            forget_pages(self._config.kv_offload_dir)

    @property
    def responsive(self) -> bool:
        return self.alive and not self.asleep

    @property
    def healthy(self) -> bool:
        return self.alive

    async def _run(self, engine: Engine) -> None:
        while True:
            self._work.clear()
            try:
                outputs = engine.step()
            except Exception as error:
                self._fail(f"the engine failed: {type(error).__name__}: {error}")
                raise
            self._deliver(
                [self._taken(each) for each in outputs], engine.stats.after(self._earlier_stats), engine.last_step
            )
            if engine.busy:
                await asyncio.sleep(0)
            else:
                await self._work.wait()

    def _taken(self, output: RequestOutput) -> RequestOutput:
        output = self._journal.take(output)
        if output.finish_reason is not None:
            self._journal.close(output.id)
        return output
