"""The interface to an engine core in this process (engine/offline/in_process_client.py), in one or several other
processes, or behind the leader.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from quire.engine.common.errors import EngineError, EngineGone, QuireError
from quire.engine.common.types import EngineCoreOutput, EngineCoreRequest, EngineInfo
from quire.engine.core.stats import BlockTableView, EngineStats, EngineView, StepRecord

log = logging.getLogger("quire.engine.link.link")


class RequestOwner(Protocol):
    """`engine` is an EngineCoreClient.number."""

    def request(self, request_id: str) -> EngineCoreRequest:
        """Return an open request with the tokens it already has."""

    def deliver(self, outputs: Sequence[EngineCoreOutput], step: StepRecord | None = None, engine: int = 0) -> None: ...

    def handle_engine_loss(self, engine: int = 0) -> None:
        """Note that the engine is gone or rebuilt. The next engine computes the open requests."""

    def handle_engine_change(self, engine: int = 0) -> None:
        """Note that the engine can accept requests, or that its process has ended."""

    def give_up(self, request_id: str, error: QuireError) -> None:
        """End the call of a request that cannot be answered."""

    def fail(self, error: EngineError, engine: int = 0) -> None:
        """Note that the engine is gone for good."""


class EngineState(msgspec.Struct, frozen=True, array_like=True):
    stats: EngineStats
    responsive: bool
    asleep: bool


class EngineCoreClient(ABC):
    """Call all methods from the same event loop."""

    owner: RequestOwner
    number = 0
    explains_prefixes = False
    """True if the engine's outputs already have a PrefixMissReport."""

    def __init__(self) -> None:
        self.stats = EngineStats()
        self.deaths = 0
        self.replays = 0
        """A request that is replayed twice counts twice."""
        self.quarantined = 0
        """Number of requests refused because they ended every engine that computed them."""
        self.weights_version = "1"
        self.weights_paths: dict[str, str | None] = {}
        """Path of each weights version except the first; None for tensors."""
        self.asleep = False
        """True while the weights and the KV cache are released. Requests wait meanwhile."""
        self.failure: EngineError | None = None
        self.failure_callbacks: list[Callable[[EngineError], None]] = []

    def launch(self) -> None:  # noqa: B027 - some clients have no process to start
        """Raises EngineError if the system cannot start a process."""

    def die(self, message: str) -> None:
        if self.failure is None:
            self.failure = EngineGone(message)
            self.owner.fail(self.failure, self.number)
            for callback in self.failure_callbacks:
                try:
                    callback(self.failure)
                except Exception:  # raised by the program that embeds the engine
                    log.exception("a failure callback failed")

    @abstractmethod
    async def start(self) -> EngineInfo:
        """Wait until the engine is ready. Raises ConfigError if it refuses its configuration, EngineError if it ends
        first.
        """

    @abstractmethod
    async def stop(self) -> None:
        """Open streams fail with EngineError."""

    @abstractmethod
    def send(self, requests: Sequence[EngineCoreRequest]) -> None: ...

    @abstractmethod
    def abort(self, request_id: str) -> None:
        """The engine may not have the request."""

    @abstractmethod
    async def snapshot(self) -> EngineView | None:
        """Return the requests and KV blocks after the current step; None if the engine ends first. The engine must be
        responsive.
        """

    @abstractmethod
    async def get_block_table(self, request_id: str) -> BlockTableView | None:
        """None if the engine does not have the request or ends first. The engine must be responsive."""

    @abstractmethod
    async def call(self, content: bytes) -> list[bytes] | None:
        """Run `content`, a call encoded by engine/common/executor.py, on every rank of every engine. Return None if an
        engine sleeps or ends first. Raises InvalidRequest if calls are not supported.
        """

    @abstractmethod
    def reset_prefix_cache(self) -> None:
        """Requests submitted from now on find no earlier prefix."""

    @property
    @abstractmethod
    def responsive(self) -> bool:
        """False while a process that ended is replaced."""

    @property
    @abstractmethod
    def healthy(self) -> bool:
        """True if `responsive`, and also while the engine sleeps or changes its weights on request."""

    @property
    def pid(self) -> int | None:
        """Process id of the first engine; None if there are no processes."""
        return None

    @property
    def engines(self) -> Sequence[EngineState]:
        """Indexed by the engine's number."""
        return [EngineState(self.stats, self.responsive, self.asleep)]


class ExclusiveClient(EngineCoreClient):
    """A client whose engine has no other client, so Weights may change the engine's weights through it."""

    @abstractmethod
    async def rest(self, level: int) -> None:
        """Release weights and KV cache, and set `asleep`."""

    @abstractmethod
    async def check(self, weights: str) -> None:
        """Raise ConfigError if the headers of the files at this path show that `load` would refuse them. Does nothing
        while the engine sleeps.
        """

    @abstractmethod
    async def load(self, weights: str | None, version: str) -> None:
        """Rebuild the engine with the weights at this path; None means the same weights."""
