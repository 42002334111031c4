"""Decides which models are awake: those that are requested, as long as their memory is within the limit.

One task makes all changes, one at a time. A model is loaded when it is first requested and sleeps when nobody has
requested it for a while. It also makes room for another model, the least recently used one first: at once if it has no
open request, else after its slice of time. Its open requests wait while it sleeps, and continue afterwards.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Literal

from quire.engine import clock
from quire.engine.checkpoint.files import stored_at
from quire.engine.checkpoint.safetensors import read_stored_weights
from quire.engine.errors import (
    ConfigError,
    EngineError,
    InvalidRequest,
    ModelError,
    ModelNotFound,
    ModelUnloadable,
    Overloaded,
    QuireError,
)
from quire.server.adapters import named_adapters
from quire.server.fleet.config import FleetConfig, ModelEntry
from quire.server.runtime import Runtime
from quire.server.served_model import not_served

log = logging.getLogger("quire.server.fleet.fleet")

State = Literal["unloaded", "loading", "awake", "sleeping"]
OpenModel = Callable[[ModelEntry], AbstractAsyncContextManager[Runtime]]
"""A model with an engine of its own, ready, until the block ends."""

_OVERHEAD = 256 * 2**20
"""Bytes that an engine's process takes beside weights, keys and values."""
_POLL_SECONDS = 0.5
_AGAIN_SECONDS = 10.0
"""After a load has failed, requests are told why for so long, before the next one tries again."""


@dataclass(eq=False, slots=True)
class Member:
    """One model."""

    entry: ModelEntry
    runtime: Runtime | None = None
    """None until it is loaded."""
    open: int = 0
    """Requests that want it awake."""
    wanted_at: float = 0.0
    """Since when requests have waited for it to be awake, by the monotonic clock; 0: none waits."""
    used_at: float = 0.0
    """When the last request came or ended."""
    awake_at: float = 0.0
    loading: bool = False
    failure: QuireError | None = None
    failed_at: float = 0.0
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the model is loaded, or the load has failed."""
    ending: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None

    @property
    def state(self) -> State:
        if self.runtime is None:
            return "loading" if self.loading else "unloaded"
        return "sleeping" if self.runtime.client.link.asleep else "awake"

    @property
    def names(self) -> Sequence[str]:
        adapters = named_adapters(self.entry.config) if self.runtime is None else self.runtime.model.adapters
        return (*self.entry.config.model_names, *adapters)

    @property
    def size(self) -> int:
        """Bytes that it takes while it is awake: as its engine said, or before it has, what its files tell."""
        config = self.entry.config
        engines = config.data_parallel_size
        if self.runtime is not None:
            info = self.runtime.info
            return int(engines * (info.weight_bytes + info.kv_bytes + info.state_bytes + _OVERHEAD))
        stored = read_stored_weights(stored_at(config))
        width = 4 if config.dtype == "float32" else 2
        weights = 0 if stored is None else stored.floats * width + stored.other_bytes
        return int((config.kv_cache_memory or 0) * 2**30 + engines * (weights + _OVERHEAD))


class Fleet:
    def __init__(self, config: FleetConfig, open_model: OpenModel) -> None:
        self.members = [Member(entry) for entry in config.entries]
        """The first is the default."""
        self._config = config
        self._open_model = open_model
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @property
    def loaded(self) -> list[Runtime]:
        return [member.runtime for member in self.members if member.runtime is not None]

    @property
    def alive(self) -> bool:
        """Whether it can still load and wake."""
        return self._task is not None and not self._task.done()

    @property
    def num_open(self) -> int:
        return sum(each.client.num_open for each in self.loaded)

    def find(self, name: str) -> Member:
        """Raises ModelNotFound."""
        for member in self.members:
            if name in member.names:
                return member
        raise not_served(name, [each for member in self.members for each in member.names])

    def add(self, entry: ModelEntry) -> Member:
        """Serve one more model. Raises InvalidRequest where one of its names is taken."""
        for name in (*entry.config.model_names, *named_adapters(entry.config)):
            if any(name in member.names for member in self.members):
                raise InvalidRequest(
                    f"model: there is a model or an adapter called {name[:200]!r} already", param="model"
                )
        self.members.append(member := Member(entry))
        return member

    async def remove(self, member: Member) -> None:
        """Unload it and serve it no more."""
        self.members.remove(member)
        member.failure, member.failed_at = ModelNotFound("The model was removed"), clock.monotonic()
        member.changed.set()
        await self.unload(member)

    async def start(self) -> None:
        """Load the first model. Raises what its start raises, with the model's name."""
        first = self.members[0]
        try:
            await self._load(first)
        except QuireError as error:
            error.message = f"models: {first.entry.name}: {error.message}"
            error.args = (error.message,)
            raise
        self._task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await asyncio.gather(*[self._unload(member) for member in self.members])

    @contextmanager
    def wanted(self, member: Member) -> Iterator[None]:
        """Within the block the model is to be awake; it may be only for a slice of the time."""
        member.open += 1
        member.used_at = clock.monotonic()
        self._wake.set()
        try:
            yield
        finally:
            member.open -= 1
            member.used_at = clock.monotonic()
            self._wake.set()

    async def load(self, member: Member) -> Runtime:
        """Wait until a model that is `wanted` is loaded. Raises what the load raises."""
        while member.runtime is None:
            if member.failure is not None and clock.monotonic() - member.failed_at < _AGAIN_SECONDS:
                told = ModelUnloadable if isinstance(member.failure, ModelError) else Overloaded
                raise told(f"The model {member.entry.name} cannot be loaded: {member.failure.message}")
            member.changed.clear()
            await member.changed.wait()
        return member.runtime

    async def unload(self, member: Member) -> None:
        """End its engine and give back all that it took. Requests that are open, or come meanwhile, end with an error
        that says to try again; the next one loads it."""
        if member.runtime is not None:
            runtime, unloaded = member.runtime, Overloaded("The model was unloaded. Please try again")
            member.ending.set()
            runtime.client.retire(unloaded)
            runtime.workers.give_up(unloaded)
        await self._unload(member)

    async def _run(self) -> None:
        while True:
            try:
                await self._step()
            except QuireError as error:
                log.error("models: %s", error.message)
            except Exception:
                log.exception("models: a change failed")
            self._wake.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(_POLL_SECONDS):  # wait_for would lose a cancel that comes with a wake
                    await self._wake.wait()

    async def _step(self) -> None:
        """Make one change, if one is due: bury, wake, or let sleep."""
        now = clock.monotonic()
        for member in self.members:
            if member.runtime is not None and not member.runtime.client.alive and not member.ending.is_set():
                log.error("models: the engine of %s could not be brought back", member.entry.name)
                await self._unload(member)
            wants = member.open > 0 and member.state != "awake" and now - member.failed_at >= _AGAIN_SECONDS
            member.wanted_at = (member.wanted_at or now) if wants else 0.0
        waiting = sorted((member for member in self.members if member.wanted_at), key=lambda member: member.wanted_at)
        if waiting:
            await self._bring(waiting[0], now)
            return
        for member in self.members:
            idle = member.entry.idle_seconds
            if member.state == "awake" and not member.open and idle and now - member.used_at > idle:
                await self._rest(member)

    async def _bring(self, member: Member, now: float) -> None:
        """Wake or load it, if there is room, or others can make some now."""
        if self._config.memory is not None:
            awake = [other for other in self.members if other.state == "awake"]
            try:
                size = await asyncio.to_thread(lambda: member.size)
                self._check_room(size)
            except QuireError as error:  # or its files are not there, or are none
                return self._fail(member, error)
            needed = size + sum(other.size for other in awake) - self._config.memory
            for other in sorted(awake, key=lambda other: (other.open > 0, other.used_at)):
                if needed <= 0:
                    break
                if other.open and now - other.awake_at < self._config.slice_seconds:
                    return
                await self._rest(other)
                needed -= other.size
        if member.runtime is None:
            with suppress(QuireError):  # which the requests are told
                await self._load(member)
        else:
            await member.runtime.weights.wake_up()
        member.awake_at = member.used_at = clock.monotonic()
        self._wake.set()

    async def _rest(self, member: Member) -> None:
        assert member.runtime is not None
        log.info("models: %s sleeps", member.entry.name)
        await member.runtime.weights.sleep(member.entry.sleep_level, "keep")

    async def _load(self, member: Member) -> None:
        """Raises what the start of its engine raises."""
        log.info("models: loading %s", member.entry.name)
        member.loading, member.failure = True, None
        member.ending.clear()
        started: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        member.task = asyncio.create_task(self._hold(member, started))
        try:
            await asyncio.shield(started)
            self._check_room(member.size)
        except Exception as error:
            if started.done():
                await self._unload(member)
            self._fail(member, error if isinstance(error, QuireError) else EngineError("an internal error"))
            raise
        finally:
            member.loading = False
            member.changed.set()

    def _check_room(self, size: int) -> None:
        """Raise ConfigError for a model that is larger than all may be together."""
        if self._config.memory is not None and size > self._config.memory:
            needed, bound = size / 2**30, self._config.memory / 2**30
            raise ConfigError(f"memory: it needs {needed:.2f} GiB awake, and all may take {bound:.2f}", param="memory")

    def _fail(self, member: Member, error: QuireError) -> None:
        """What its requests are told, for a while."""
        member.failure, member.failed_at = error, clock.monotonic()
        member.changed.set()

    async def _hold(self, member: Member, started: asyncio.Future[None]) -> None:
        """What serves it, from the load to `ending`."""
        try:
            async with self._open_model(member.entry) as runtime:
                runtime.workers.start()
                member.runtime = runtime
                member.awake_at = member.used_at = clock.monotonic()
                started.set_result(None)
                await member.ending.wait()
        except Exception as error:
            if started.done():
                log.exception("models: %s ended with an error", member.entry.name)
            else:
                started.set_exception(error)
        finally:
            member.runtime = None

    async def _unload(self, member: Member) -> None:
        member.ending.set()
        if (task := member.task) is not None:
            await asyncio.gather(task, return_exceptions=True)
            member.task = None if member.task is task else member.task  # a request may have it loaded already
