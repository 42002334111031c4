"""The weights that an engine computes with, while requests are open: let go, taken back, replaced; one change at a
time.

The engine is built anew for each change, and every open request is submitted to it with the tokens that it already has,
as after a crash (process_client.py). So a stream outlives a change, and nothing that the old weights computed, such as
a cached prefix, is there for the new ones.
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
"""What becomes of the requests that are open when weights change. keep: they go on after it, with the weights that are
there then; wait: they end first, and newer ones wait; abort: they end at once, with what they have."""
MODES: tuple[str, ...] = get_args(Mode)
LEVELS = (1, 2)
_POLL_SECONDS = 0.01

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Change:
    """One that was asked for: an engine is to be let go, or built anew."""

    config: EngineConfig
    version: str
    call_id: int
    take_result: Callable[[UtilityResult], None]
    """What is done at once when the engine's process says that it is made."""
    done: asyncio.Future[None]


class WeightChanges(Protocol):
    """Of the engine of a client, made here or by the leader."""

    async def sleep(self, level: int = 1, mode: Mode = "keep", *, refuse: bool = False) -> None: ...

    async def wake_up(self) -> None: ...

    async def update(self, path: str, mode: Mode = "keep", version: str | None = None) -> str: ...


class Weights:
    """Changes the weights of a client's engine. All methods must be called from the client's event loop."""

    def __init__(self, client: EngineClient) -> None:
        assert isinstance(client.engine_core, ExclusiveClient), "a hub changes the weights of its engine itself"
        self._client, self._engine_core = client, client.engine_core
        self._changing = asyncio.Lock()
        self._used = {self._engine_core.weights_version}
        """Versions that were served so far."""

    async def sleep(self, level: int = 1, mode: Mode = "keep", *, refuse: bool = False) -> None:
        """Let weights and KV cache go, until `wake_up`. Asleep already: only `refuse` is taken over.

        level 1: the engine's process stays, and wakes soon; 2: it ends, which gives back all of its memory. refuse: new
        requests are answered with an error; else they wait. Raises EngineError when the engine cannot be told.
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
        """Take the weights back. Awake: does nothing. Raises ConfigError where they or their memory are not to be had;
        then it sleeps on."""

        async def wake() -> None:
            if self._engine_core.asleep:
                await self._engine_core.load(None, self._engine_core.weights_version)
            self._client.refusing = False

        await to_its_end(self._changing, wake())

    async def update(self, path: str, mode: Mode = "keep", version: str | None = None) -> str:
        """Compute with the weights in another folder, or GGUF file; wakes an engine that sleeps. Returns their version.

        version: what to call them; by default they are counted. Raises InvalidRequest for weights that are not of the
        model's shape, and ConfigError for those that cannot be loaded: then the old weights go on.
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
        """As `update`, with a method of the client that takes the version and loads the weights; and one that refuses
        some before any request has ended for them. `path`: where they are, if they are in files."""
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
        """Requests that are open now are treated as `mode` says; those that come until the block ends wait for it."""
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
    """The result of a call that no other with this lock is beside. It is made to its end, even if nobody waits for it
    any more: by then the engine may have let its weights go already."""

    async def run_in_turn() -> Result:
        async with turn:
            return await call

    task = asyncio.create_task(run_in_turn())
    task.add_done_callback(lambda done: None if done.cancelled() else done.exception())
    return await asyncio.shield(task)


def check_mode(mode: str) -> None:
    """Raises InvalidRequest for one that is none."""
    if mode not in MODES:
        raise InvalidRequest(f"mode must be one of {', '.join(MODES)}, got {mode!r}", param="mode")


def absolute(path: str) -> str:
    """Of a folder or file that is there. Raises InvalidRequest for any other."""
    if not path or "\0" in path or not os.path.exists(path):
        raise InvalidRequest(f"path: there is no folder or file {path[:200]!r}", param="path")
    return os.path.abspath(path)
