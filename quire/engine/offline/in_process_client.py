from __future__ import annotations

import asyncio
import gc
import traceback
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from quire.engine.checkpoint.kv_offload_dir import delete_kv_blocks
from quire.engine.client.engine_core_client import ExclusiveClient
from quire.engine.common.config import EngineConfig, capacity_settings_from_info
from quire.engine.common.errors import ConfigError, EngineError, QuireError
from quire.engine.common.types import EngineCoreRequest, EngineInfo
from quire.engine.core.stats import BlockTableView, EngineStats, EngineView

if TYPE_CHECKING:
    from quire.engine.engine_core import EngineCore, Logprobs, NamedTensors


class InProcessClient(ExclusiveClient):
    """An engine core in a task of the current event loop. During a step, the loop runs nothing else."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__()
        self._config = config
        self._engine: EngineCore | None = None
        self._open_requests: dict[str, None] = {}
        """Ids in order of submission."""
        self._work_event = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._memory_plan: dict[str, int] = {}
        """The first engine's capacity settings, for later engines."""
        self._has_given_tensors = False
        """True if the weights came as tensors, so that no file has them."""
        self._earlier_stats = EngineStats()

    async def start(self) -> EngineInfo:
        # this import loads torch
        from quire.engine.engine_core import EngineCore

        engine = EngineCore(self._config)
        self._memory_plan = capacity_settings_from_info(engine.info)
        self._adopt_engine(engine)
        return engine.info

    async def compute_logprobs(self, token_ids: Sequence[int], *, full_vocabulary: bool) -> Logprobs:
        """See EngineCore.compute_logprobs. Raises EngineError while there are no weights."""
        if self._engine is None:
            raise EngineError("the model is asleep: call wake_up() or load_weights() first")
        return self._engine.compute_logprobs(token_ids, full_vocabulary=full_vocabulary)

    async def stop(self) -> None:
        await self._release_engine()
        self.die("the engine was stopped")
        gc.collect()  # reference cycles would delay the release of memory

    async def rest(self, level: int) -> None:
        """Both levels do the same, because there is no process to end."""
        self.asleep = True
        await self._release_engine()

    async def check(self, weights: str) -> None:
        if self._engine is not None:
            self._engine.check_replacement_weights(self._config_with_weights(weights))

    async def load(self, weights: str | None, version: str) -> None:
        if weights is None and self._has_given_tensors:
            raise ConfigError("the weights before sleep are not in a file: load_weights loads them and wakes the model")
        if weights is not None:
            await self.check(weights)
        await self._replace_engine(self._config_with_weights(weights), version)

    def _config_with_weights(self, weights: str | None) -> EngineConfig:
        update = {} if weights is None else {"weights": weights, "load_format": "auto"}
        return self._config.model_copy(update=self._memory_plan | update)

    async def load_tensors(self, tensors: NamedTensors, version: str) -> None:
        """If `tensors` (weights by checkpoint name) cannot be loaded, the previous weights are restored from their
        files. Without files, the model sleeps until it gets tensors.
        """
        # An earlier update's folder may have been deleted.
        config = self._config.model_copy(update=self._memory_plan | {"load_format": "auto", "weights": None})
        await self._replace_engine(config, version, tensors)

    async def _replace_engine(self, config: EngineConfig, version: str, tensors: NamedTensors | None = None) -> None:
        from quire.engine.engine_core import EngineCore, free_engine_memory

        if self.failure is not None:
            raise self.failure
        before = None if self.asleep or self._has_given_tensors else self._config
        self.asleep = True
        await self._release_engine()
        try:
            engine = EngineCore(config, tensors=tensors)
        except Exception as error:
            traceback.clear_frames(error.__traceback__)  # frames hold loaded tensors
            free_engine_memory()
            if before is not None:
                with suppress(QuireError):  # stay asleep if the files are gone
                    self._adopt_engine(EngineCore(before.model_copy(update=self._memory_plan)))
            raise
        self._config = config
        self._has_given_tensors = tensors is not None
        self.weights_version = version
        self._adopt_engine(engine)

    def _adopt_engine(self, engine: EngineCore) -> None:
        self._engine, self.asleep = engine, False
        self.stats = engine.engine_stats.add_earlier(self._earlier_stats)
        for request_id in self._open_requests:
            engine.add_request(self.owner.request(request_id))
        self._task = asyncio.create_task(self._run_steps(engine))

    async def _release_engine(self) -> None:
        """Open requests stay open."""
        task = self._task
        engine = self._engine
        self._task = None
        self._engine = None
        if task is None or engine is None:
            return
        from quire.engine.engine_core import free_engine_memory

        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        engine.shut_down()
        del task, engine
        self.owner.handle_engine_loss()
        self._earlier_stats = self.stats = self.stats.without_gauges()
        free_engine_memory()

    def send(self, requests: Sequence[EngineCoreRequest]) -> None:
        for request in requests:
            self._open_requests[request.id] = None
            if self._engine is not None:
                self._engine.add_request(request)
        self._work_event.set()

    def abort(self, request_id: str) -> None:
        self._open_requests.pop(request_id, None)
        if self._engine is not None:
            self._engine.abort_request(request_id)
        self._work_event.set()

    async def snapshot(self) -> EngineView | None:
        return None if self._engine is None else self._engine.make_engine_view()

    async def get_block_table(self, request_id: str) -> BlockTableView | None:
        return None if self._engine is None else self._engine.get_block_table(request_id)

    async def call(self, content: bytes) -> list[bytes] | None:
        return None if self._engine is None else self._engine.run_collective_rpc(content)

    def reset_prefix_cache(self) -> None:
        if self._engine is not None:
            self._engine.reset_prefix_cache()
        elif self._config.kv_offload_dir is not None:
            delete_kv_blocks(self._config.kv_offload_dir)

    @property
    def responsive(self) -> bool:
        return not self.asleep

    @property
    def healthy(self) -> bool:
        return True

    async def _run_steps(self, engine: EngineCore) -> None:
        while True:
            self._work_event.clear()
            try:
                outputs = engine.step()
            except Exception as error:
                self.die(f"the engine failed: {type(error).__name__}: {error}")
                raise
            for output in outputs:
                if output.finish_reason is not None:
                    self._open_requests.pop(output.id, None)
            self.stats = engine.engine_stats.add_earlier(self._earlier_stats)
            self.owner.deliver(outputs, engine.last_step_record)
            if engine.has_work:
                await asyncio.sleep(0)
            else:
                await self._work_event.wait()
