"""The interface to an engine core: in this process (engine/offline/in_process_client.py), in one or several others, or
behind the leader.
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
    """Owner of the requests that a client passes on. `engine`: see EngineCoreClient.number."""

    def request(self, request_id: str) -> EngineCoreRequest:
        """Return an open request with the tokens it already has."""

    def deliver(self, outputs: Sequence[EngineCoreOutput], step: StepRecord | None = None, engine: int = 0) -> None:
        """Take the engine's outputs. step: the step that made them."""

    def handle_engine_loss(self, engine: int = 0) -> None:
        """The engine is gone or rebuilt; the next one computes the open requests."""

    def handle_engine_change(self, engine: int = 0) -> None:
        """The engine can take requests, or its process has ended."""

    def give_up(self, request_id: str, error: QuireError) -> None:
        """End the call of a request that cannot be answered."""

    def fail(self, error: EngineError, engine: int = 0) -> None:
        """The engine is gone for good."""


class EngineState(msgspec.Struct, frozen=True, array_like=True):
    stats: EngineStats
    responsive: bool
    asleep: bool


class EngineCoreClient(ABC):
    """Call all methods from the same event loop."""

    owner: RequestOwner
    number = 0
    explains_prefixes = False
    """True if outputs have a PrefixMissReport."""

    def __init__(self) -> None:
        self.stats = EngineStats()
        self.deaths = 0
        self.replays = 0
        """Each replay of a request counts."""
        self.quarantined = 0
        """Requests refused because they ended every engine that computed them."""
        self.weights_version = "1"
        self.weights_paths: dict[str, str | None] = {}
        """Source of each version but the first; None: tensors."""
        self.asleep = False
        """Weights and KV cache are released, and requests wait."""
        self.failure: EngineError | None = None
        self.failure_callbacks: list[Callable[[EngineError], None]] = []

    def launch(self) -> None:  # noqa: B027 - nothing, where no process has to be started
        """Begin to start the engine. Raises EngineError if the system can start no process."""

    def die(self, message: str) -> None:
        """Only the first call counts."""
        if self.failure is None:
            self.failure = EngineGone(message)
            self.owner.fail(self.failure, self.number)
            for callback in self.failure_callbacks:
                try:
                    callback(self.failure)
                except Exception:  # raised by the embedding program
                    log.exception("a failure callback failed")

    @abstractmethod
    async def start(self) -> EngineInfo:
        """Wait until the engine is ready. Raises ConfigError if it refuses its configuration, EngineError if it ends
        meanwhile.
        """

    @abstractmethod
    async def stop(self) -> None:
        """End the engine. Open streams fail with EngineError."""

    @abstractmethod
    def send(self, requests: Sequence[EngineCoreRequest]) -> None:
        """Submit new requests."""

    @abstractmethod
    def abort(self, request_id: str) -> None:
        """The engine may not have the request."""

    @abstractmethod
    async def snapshot(self) -> EngineView | None:
        """Requests and KV blocks after the current step; None if the engine ends first. It must be responsive."""

    @abstractmethod
    async def get_block_table(self, request_id: str) -> BlockTableView | None:
        """None if the engine does not have the request. Otherwise like `snapshot`."""

    @abstractmethod
    async def call(self, content: bytes) -> list[bytes] | None:
        """Run `content`, a call encoded by engine/common/executor.py, on every rank of every engine. None if an engine
        sleeps or ends first. Raises InvalidRequest if calls are not supported.
        """

    @abstractmethod
    def reset_prefix_cache(self) -> None:
        """Requests submitted from now on find no earlier prefix."""

    @property
    @abstractmethod
    def responsive(self) -> bool:
        """True if the engine would answer now; False while an ended process is replaced."""

    @property
    @abstractmethod
    def healthy(self) -> bool:
        """Like `responsive`, but also True while the engine sleeps or changes its weights on request."""

    @property
    def pid(self) -> int | None:
        """Process id of the first engine; None without processes."""
        return None

    @property
    def engines(self) -> Sequence[EngineState]:
        """Indexed by number."""
        return [EngineState(self.stats, self.responsive, self.asleep)]


class ExclusiveClient(EngineCoreClient):
    """Its engine has no other client. Weights uses it to change the weights."""

    @abstractmethod
    async def rest(self, level: int) -> None:
        """Release weights and KV cache, and set `asleep`."""

    @abstractmethod
    async def check(self, weights: str) -> None:
        """Raise ConfigError if the file headers show that `load` would refuse the weights at this path. Does nothing
        while the engine sleeps.
        """

    @abstractmethod
    async def load(self, weights: str | None, version: str) -> None:
        """Rebuild the engine with the weights at this path; None: the same weights."""
