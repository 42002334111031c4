"""Keeps requested models awake within the memory limit. One task makes all changes, one at a time. A model is loaded on
its first request and sleeps when idle. The least recently used model makes room first: at once without open requests,
otherwise after its time slice, while its requests wait.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Literal

from quire.engine.checkpoint.model_resolver import resolve_weights
from quire.engine.checkpoint.tensor_headers import read_checkpoint_size
from quire.engine.common import clock
from quire.engine.common.errors import (
    ConfigError,
    EngineError,
    InvalidRequest,
    ModelError,
    ModelNotFound,
    ModelNotLoadable,
    Overloaded,
    QuireError,
)
from quire.server.adapter_registry import configured_adapter_names
from quire.server.multi_model.models_config import ModelEntry, ModelsConfig
from quire.server.runtime.model_runtime import ModelRuntime
from quire.server.served_model import model_not_found_error

log = logging.getLogger("quire.server.multi_model.fleet")

ModelState = Literal["unloaded", "loading", "awake", "sleeping"]
OpenRuntime = Callable[[ModelEntry], AbstractAsyncContextManager[ModelRuntime]]

_PROCESS_OVERHEAD_BYTES = 256 * 2**20
_POLL_SECONDS = 0.5
_RETRY_SECONDS = 10.0


@dataclass(eq=False, slots=True)
class ManagedModel:
    entry: ModelEntry
    runtime: ModelRuntime | None = None
    num_open: int = 0
    waiting_since: float = 0.0
    """Monotonic time; 0 if no request waits."""
    last_used_at: float = 0.0
    awake_since: float = 0.0
    is_loading: bool = False
    failure: QuireError | None = None
    failed_at: float = 0.0
    load_finished: asyncio.Event = field(default_factory=asyncio.Event)
    stop_event: asyncio.Event = field(default_factory=asyncio.Event)
    serve_task: asyncio.Task[None] | None = None

    @property
    def state(self) -> ModelState:
        if self.runtime is None:
            return "loading" if self.is_loading else "unloaded"
        return "sleeping" if self.runtime.client.engine_core.asleep else "awake"

    @property
    def served_names(self) -> Sequence[str]:
        adapters = configured_adapter_names(self.entry.config) if self.runtime is None else self.runtime.model.adapters
        return (*self.entry.config.model_names, *adapters)

    @property
    def awake_memory_bytes(self) -> int:
        """Estimated from the checkpoint's files until the engine reports it."""
        config = self.entry.config
        engines = config.data_parallel_size
        if self.runtime is not None:
            info = self.runtime.info
            return int(engines * (info.weight_bytes + info.kv_bytes + info.state_bytes + _PROCESS_OVERHEAD_BYTES))
        stored = read_checkpoint_size(resolve_weights(config))
        width = 4 if config.dtype == "float32" else 2
        weights = 0 if stored is None else stored.num_floats * width + stored.packed_bytes + stored.cpu_expansion
        return int((config.kv_cache_memory or 0) * 2**30 + engines * (weights + _PROCESS_OVERHEAD_BYTES))


class ModelManager:
    def __init__(self, config: ModelsConfig, open_runtime: OpenRuntime) -> None:
        self.managed_models = [ManagedModel(entry) for entry in config.entries]
        self._config = config
        self._open_runtime = open_runtime
        self._change_event = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @property
    def loaded_runtimes(self) -> list[ModelRuntime]:
        return [member.runtime for member in self.managed_models if member.runtime is not None]

    @property
    def is_alive(self) -> bool:
        return self._task is not None and not self._task.done()

    @property
    def num_open_requests(self) -> int:
        return sum(each.client.num_open for each in self.loaded_runtimes)

    def require_model(self, name: str) -> ManagedModel:
        """Raises ModelNotFound."""
        for member in self.managed_models:
            if name in member.served_names:
                return member
        raise model_not_found_error(name, [each for member in self.managed_models for each in member.served_names])

    def add_model(self, entry: ModelEntry) -> ManagedModel:
        """Raises InvalidRequest if a name is taken."""
        for name in (*entry.config.model_names, *configured_adapter_names(entry.config)):
            if any(name in member.served_names for member in self.managed_models):
                raise InvalidRequest(
                    f"model: there is already a model or an adapter called {name[:200]!r}", param="model"
                )
        self.managed_models.append(member := ManagedModel(entry))
        return member

    async def remove_model(self, member: ManagedModel) -> None:
        self.managed_models.remove(member)
        member.failure, member.failed_at = ModelNotFound("The model was removed"), clock.monotonic()
        member.load_finished.set()
        await self.abort_requests_and_unload(member)

    async def start(self) -> None:
        """Raises the errors of the first model's start."""
        first = self.managed_models[0]
        try:
            await self._load_model(first)
        except QuireError as error:
            error.message = f"models: {first.entry.name}: {error.message}"
            error.args = (error.message,)
            raise
        self._task = asyncio.create_task(self._run_change_loop())

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await asyncio.gather(*[self._close_model_runtime(member) for member in self.managed_models])

    @contextmanager
    def keep_awake(self, member: ManagedModel) -> Iterator[None]:
        """Also wakes `member`. If the memory limit does not suffice for all requested models, they take turns."""
        member.num_open += 1
        member.last_used_at = clock.monotonic()
        self._change_event.set()
        try:
            yield
        finally:
            member.num_open -= 1
            member.last_used_at = clock.monotonic()
            self._change_event.set()

    async def wait_until_loaded(self, member: ManagedModel) -> ModelRuntime:
        """Call this inside `keep_awake`. Raises ModelNotLoadable if the model is invalid, Overloaded if its start fails
        otherwise.
        """
        while member.runtime is None:
            if member.failure is not None and clock.monotonic() - member.failed_at < _RETRY_SECONDS:
                error_class = ModelNotLoadable if isinstance(member.failure, ModelError) else Overloaded
                raise error_class(f"The model {member.entry.name} cannot be loaded: {member.failure.message}")
            member.load_finished.clear()
            await member.load_finished.wait()
        return member.runtime

    async def abort_requests_and_unload(self, member: ManagedModel) -> None:
        """Open requests fail with the advice to retry; the next request loads the model."""
        if member.runtime is not None:
            runtime, unloaded = member.runtime, Overloaded("The model was unloaded. Please try again")
            member.stop_event.set()
            runtime.client.retire(unloaded)
            runtime.workers.fail_jobs(unloaded)
        await self._close_model_runtime(member)

    async def _run_change_loop(self) -> None:
        while True:
            try:
                await self._apply_due_change()
            except QuireError as error:
                log.error("models: %s", error.message)
            except Exception:
                log.exception("models: a change failed")
            self._change_event.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(_POLL_SECONDS):  # wait_for could lose a cancellation here
                    await self._change_event.wait()

    async def _apply_due_change(self) -> None:
        now = clock.monotonic()
        for member in self.managed_models:
            if member.runtime is not None and not member.runtime.client.alive and not member.stop_event.is_set():
                log.error("models: the engine of %s could not be restarted", member.entry.name)
                await self._close_model_runtime(member)
            needs_wake = member.num_open > 0 and member.state != "awake" and now - member.failed_at >= _RETRY_SECONDS
            member.waiting_since = (member.waiting_since or now) if needs_wake else 0.0
        waiting = sorted(
            (member for member in self.managed_models if member.waiting_since), key=lambda member: member.waiting_since
        )
        if waiting:
            await self._wake_or_load_if_room(waiting[0], now)
            return
        for member in self.managed_models:
            idle = member.entry.idle_seconds
            if member.state == "awake" and not member.num_open and idle and now - member.last_used_at > idle:
                await self._put_to_sleep(member)

    async def _wake_or_load_if_room(self, member: ManagedModel, now: float) -> None:
        if self._config.memory_limit_bytes is not None:
            awake = [other for other in self.managed_models if other.state == "awake"]
            try:
                size = await asyncio.to_thread(lambda: member.awake_memory_bytes)
                self._check_fits_memory_limit(size)
            except QuireError as error:
                return self._record_failure(member, error)
            needed = size + sum(other.awake_memory_bytes for other in awake) - self._config.memory_limit_bytes
            for other in sorted(awake, key=lambda other: (other.num_open > 0, other.last_used_at)):
                if needed <= 0:
                    break
                if other.num_open and now - other.awake_since < self._config.slice_seconds:
                    return
                await self._put_to_sleep(other)
                needed -= other.awake_memory_bytes
        if member.runtime is None:
            with suppress(QuireError):  # the model's requests get the error
                await self._load_model(member)
        else:
            await member.runtime.weight_controller.wake_up()
        member.awake_since = member.last_used_at = clock.monotonic()
        self._change_event.set()

    async def _put_to_sleep(self, member: ManagedModel) -> None:
        assert member.runtime is not None
        log.info("models: %s sleeps", member.entry.name)
        await member.runtime.weight_controller.sleep(member.entry.sleep_level, "keep")

    async def _load_model(self, member: ManagedModel) -> None:
        log.info("models: loading %s", member.entry.name)
        member.is_loading, member.failure = True, None
        member.stop_event.clear()
        started: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        member.serve_task = asyncio.create_task(self._serve_until_stopped(member, started))
        try:
            await asyncio.shield(started)
            self._check_fits_memory_limit(member.awake_memory_bytes)
        except Exception as error:
            if started.done():
                await self._close_model_runtime(member)
            self._record_failure(member, error if isinstance(error, QuireError) else EngineError("an internal error"))
            raise
        finally:
            member.is_loading = False
            member.load_finished.set()

    def _check_fits_memory_limit(self, size: int) -> None:
        if self._config.memory_limit_bytes is not None and size > self._config.memory_limit_bytes:
            needed, bound = size / 2**30, self._config.memory_limit_bytes / 2**30
            raise ConfigError(
                f"memory: it needs {needed:.2f} GiB while awake, and all models together may use {bound:.2f}",
                param="memory",
            )

    def _record_failure(self, member: ManagedModel, error: QuireError) -> None:
        member.failure, member.failed_at = error, clock.monotonic()
        member.load_finished.set()

    async def _serve_until_stopped(self, member: ManagedModel, started: asyncio.Future[None]) -> None:
        try:
            async with self._open_runtime(member.entry) as runtime:
                runtime.workers.start_fork_server()
                member.runtime = runtime
                member.awake_since = member.last_used_at = clock.monotonic()
                started.set_result(None)
                await member.stop_event.wait()
        except Exception as error:
            if started.done():
                log.exception("models: %s ended with an error", member.entry.name)
            else:
                started.set_exception(error)
        finally:
            member.runtime = None

    async def _close_model_runtime(self, member: ManagedModel) -> None:
        member.stop_event.set()
        if (task := member.serve_task) is not None:
            await asyncio.gather(task, return_exceptions=True)
            member.serve_task = (
                None if member.serve_task is task else member.serve_task
            )  # a request may already have loaded it again
