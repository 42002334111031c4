"""The interface between EngineClient and an engine core.

InProcessClient (engine/offline/in_process_client.py) has the engine core in this process, ProcessClient
(process_client.py) in its own process, ReplicatedClient (replicated_client.py) has several of these, and SharedClient
(shared_client.py) shares one with other processes.
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
    """Owns the requests that a client passes on. `engine`: the engine's index among the engines of one model."""

    def request(self, request_id: str) -> EngineCoreRequest:
        """Return an open request with the tokens that it already has."""

    def deliver(self, outputs: Sequence[EngineCoreOutput], step: StepRecord | None = None, engine: int = 0) -> None:
        """Take outputs of the engine. step: the step that made them."""

    def handle_engine_loss(self, engine: int = 0) -> None:
        """The engine is gone or is rebuilt; the next one computes the open requests."""

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
    """All methods must be called from the same event loop."""

    owner: RequestOwner
    """Set by the owner itself."""
    number = 0
    """The engine's index among the engines of its model."""
    explains_prefixes = False
    """Outputs already have a PrefixMissReport."""

    def __init__(self) -> None:
        self.stats = EngineStats()
        self.deaths = 0
        """Engine processes that ended unasked."""
        self.replays = 0
        """Requests submitted again after an engine ended, counted once per replay."""
        self.quarantined = 0
        """Requests given up because they ended every engine that computed them."""
        self.weights_version = "1"
        """Version of the weights that compute the next token."""
        self.weights_paths: dict[str, str | None] = {}
        """Source of the weights by version, except the first; None: they came as tensors."""
        self.asleep = False
        """Weights and KV cache are released; requests wait until they are back."""
        self.failure: EngineError | None = None
        """Why the engine has ended for good."""
        self.failure_callbacks: list[Callable[[EngineError], None]] = []
        """A program's callbacks for `failure`."""

    def launch(self) -> None:  # noqa: B027 - nothing, where no process has to be started
        """Begin to start the engine and return at once. Raises EngineError if the system can start no process."""

    def die(self, message: str) -> None:
        """The engine is gone for good. Only the first call counts."""
        if self.failure is None:
            self.failure = EngineGone(message)
            self.owner.fail(self.failure, self.number)
            for callback in self.failure_callbacks:
                try:
                    callback(self.failure)
                except Exception:  # of a program
                    log.exception("a failure callback failed")

    @abstractmethod
    async def start(self) -> EngineInfo:
        """Start the engine and wait until it is ready. Raises ConfigError for a configuration it cannot start with,
        EngineError if it ends while it starts.
        """

    @abstractmethod
    async def stop(self) -> None:
        """End the engine. Open streams fail with EngineError."""

    @abstractmethod
    def send(self, requests: Sequence[EngineCoreRequest]) -> None:
        """Submit new requests."""

    @abstractmethod
    def abort(self, request_id: str) -> None:
        """Tell the engine to stop computing a request, if it has it."""

    @abstractmethod
    async def snapshot(self) -> EngineView | None:
        """Requests and KV blocks after the current step; None if the engine ends first. Call it only while the engine
        is responsive.
        """

    @abstractmethod
    async def get_block_table(self, request_id: str) -> BlockTableView | None:
        """The block table of a request after the engine's current step; None if the engine does not have it, or ends
        before it answers. Call it only while the engine is responsive."""

    @abstractmethod
    async def call(self, content: bytes) -> list[bytes] | None:
        """Run `content`, a call encoded by engine/common/executor.py, on every rank of every engine. None if an engine
        sleeps or ends first. Raises InvalidRequest if calls are not supported.
        """

    @abstractmethod
    def reset_prefix_cache(self) -> None:
        """Requests submitted from now on find no prefix of an earlier one."""

    @property
    @abstractmethod
    def responsive(self) -> bool:
        """True if the engine would answer now; False while an ended process is replaced."""

    @property
    @abstractmethod
    def healthy(self) -> bool:
        """Like `responsive`, but also true while the engine sleeps or changes its weights on request."""

    @property
    def pid(self) -> int | None:
        """Process id of the first engine; None without processes."""
        return None

    @property
    def engines(self) -> Sequence[EngineState]:
        """States of all engines, by number."""
        return [EngineState(self.stats, self.responsive, self.asleep)]


class ExclusiveClient(EngineCoreClient):
    """The only client of its engine. Weights calls these methods to change the weights."""

    @abstractmethod
    async def rest(self, level: int) -> None:
        """Release weights and KV cache, and set `asleep`."""

    @abstractmethod
    async def check(self, weights: str) -> None:
        """Raise ConfigError if `load` would refuse the weights at this path by their files' headers. A sleeping engine
        checks nothing.
        """

    @abstractmethod
    async def load(self, weights: str | None, version: str) -> None:
        """Rebuild the engine with the weights at this path; None: the same weights."""
