"""Releases, restores or replaces an engine's weights while requests are open, one change at a time. Each change
rebuilds the engine and submits the open requests again with their tokens (process_client.py). Therefore streams
survive, and nothing that the old weights computed is used with the new weights.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any, Literal, Protocol, TypeVar, get_args

from quire.engine.client.engine_client import EngineClient
from quire.engine.client.engine_core_client import ExclusiveClient
from quire.engine.common.config import EngineConfig
from quire.engine.common.errors import InvalidRequest
from quire.engine.processes.utility_calls import UtilityResult

Mode = Literal["keep", "wait", "abort"]
"""What happens to open requests: "keep" continues them with the new weights, "wait" lets them finish first, "abort"
ends them at once.
"""
MODES: tuple[str, ...] = get_args(Mode)
LEVELS = (1, 2)
_POLL_SECONDS = 0.01

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Change:
    config: EngineConfig
    version: str
    call_id: int
    take_result: Callable[[UtilityResult], None]
    done: asyncio.Future[None]


class WeightChanges(Protocol):
    async def sleep(self, level: int = 1, mode: Mode = "keep", *, refuse: bool = False) -> None: ...

    async def wake_up(self) -> None: ...

    async def update(self, path: str, mode: Mode = "keep", version: str | None = None) -> str: ...


class Weights:
    """Call all methods from the client's event loop."""

    def __init__(self, client: EngineClient) -> None:
        assert isinstance(client.engine_core, ExclusiveClient), "a hub changes the weights of its engine itself"
        self._client, self._engine_core = client, client.engine_core
        self._changing = asyncio.Lock()
        self._used = {self._engine_core.weights_version}

    async def sleep(self, level: int = 1, mode: Mode = "keep", *, refuse: bool = False) -> None:
        """Releases weights and KV cache until `wake_up` or `update`. If the engine is asleep already, only sets
        `refuse`. With `level` 1 the engine's process stays and wakes soon; with 2 it ends, which frees all memory. With
        `refuse`, new requests fail instead of waiting. Raises InvalidRequest, EngineError if the engine is gone, and
        Overloaded while it is being replaced.
        """
        if level not in LEVELS:
            raise InvalidRequest(f"level must be 1 or 2, got {level}", param="level")
        check_mode(mode)

        async def rest() -> None:
            if not self._engine_core.asleep:
                async with self._hold_requests(mode):
                    await self._engine_core.rest(level)
            self._client.refusing = refuse

        await to_its_end(self._changing, rest())

    async def wake_up(self) -> None:
        """Raises ConfigError if the weights or the memory for them are unavailable. The engine then stays asleep."""

        async def wake() -> None:
            if self._engine_core.asleep:
                await self._engine_core.load(None, self._engine_core.weights_version)
            self._client.refusing = False

        await to_its_end(self._changing, wake())

    async def update(self, path: str, mode: Mode = "keep", version: str | None = None) -> str:
        """Loads weights from a folder or GGUF file, wakes the engine, and returns the weights' version (default: a
        counter). Raises InvalidRequest if the path does not exist, ConfigError if the weights do not have the model's
        shapes or cannot be loaded. The old weights then stay.
        """
        weights_path = absolute(path)
        check = partial(self._engine_core.check, weights_path)
        return await self.change(partial(self._engine_core.load, weights_path), mode, version, check, path=weights_path)

    async def change(
        self,
        load: Callable[[str], Coroutine[Any, Any, None]],
        mode: Mode = "keep",
        version: str | None = None,
        check: Callable[[], Coroutine[Any, Any, None]] | None = None,
        *,
        path: str | None = None,
    ) -> str:
        """Works like `update`, but loads the weights with `load`, which gets their version. `check` may refuse the
        weights before requests are affected. `path`: the weights' files, if any.
        """
        check_mode(mode)

        async def change_weights() -> str:
            if check is not None:
                await check()
            name = version or next(free for free in map(str, count(len(self._used) + 1)) if free not in self._used)
            async with self._hold_requests(mode):
                self._engine_core.weights_paths[name] = path
                await load(name)
            self._used.add(name)
            self._client.refusing = False
            return name

        return await to_its_end(self._changing, change_weights())

    @asynccontextmanager
    async def _hold_requests(self, mode: Mode) -> AsyncIterator[None]:
        client = self._client
        client.hold()
        try:
            if mode == "abort":
                client.abort_all()
            while mode == "wait" and not self._engine_core.asleep and client.has_unheld:  # noqa: ASYNC110 - a poll is soon enough
                await asyncio.sleep(_POLL_SECONDS)
            yield
        finally:
            client.release()


async def to_its_end(turn: asyncio.Lock, call: Coroutine[Any, Any, Result]) -> Result:
    """Runs the call under the lock, even if nobody awaits it any longer, because the call may have released weights."""

    async def run_in_turn() -> Result:
        async with turn:
            return await call

    task = asyncio.create_task(run_in_turn())
    task.add_done_callback(lambda done: None if done.cancelled() else done.exception())
    return await asyncio.shield(task)


def check_mode(mode: str) -> None:
    """Raises InvalidRequest for an unknown mode."""
    if mode not in MODES:
        raise InvalidRequest(f"mode must be one of {', '.join(MODES)}, got {mode!r}", param="mode")


def absolute(path: str) -> str:
    """Raises InvalidRequest if there is no such folder or file."""
    if not path or "\0" in path or not os.path.exists(path):
        raise InvalidRequest(f"path: there is no folder or file {path[:200]!r}", param="path")
    return os.path.abspath(path)
