"""The boundary between a book of requests and an engine: what the book (EngineClient) asks, and what it is told.

There are four: InProcessClient (engine/offline/in_process_client.py) to an engine in this process, ProcessClient
(process_client.py) to one in a process of its own, ReplicatedClient (replicated_client.py) to several of these, and
SharedClient (shared_client.py) to one that other processes use, too.
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
    """Has the requests that a client passes on. `engine`: the number of its engine among those of one model."""

    def request(self, request_id: str) -> EngineCoreRequest:
        """An open request, with the tokens that it already has."""

    def deliver(self, outputs: Sequence[EngineCoreOutput], step: StepRecord | None = None, engine: int = 0) -> None:
        """Take outputs of the engine. step: the record of the step that they came from."""

    def handle_engine_loss(self, engine: int = 0) -> None:
        """The engine is gone, or is built anew; the next one will compute what is open."""

    def handle_engine_change(self, engine: int = 0) -> None:
        """The engine can be given requests, or its process has ended."""

    def give_up(self, request_id: str, error: QuireError) -> None:
        """End the call of a request that cannot be answered."""

    def fail(self, error: EngineError, engine: int = 0) -> None:
        """The engine is gone for good."""


class EngineState(msgspec.Struct, frozen=True, array_like=True):
    """One engine, as it is measured."""

    stats: EngineStats
    responsive: bool
    asleep: bool


class EngineCoreClient(ABC):
    """To an engine. All methods must be called from the same event loop."""

    owner: RequestOwner
    """Set by the owner itself."""
    number = 0
    """Of the engine among those of its model."""
    explains_prefixes = False
    """Whether outputs come with a PrefixMissReport already."""

    def __init__(self) -> None:
        self.stats = EngineStats()
        self.deaths = 0
        """Engine processes that ended without having been stopped."""
        self.replays = 0
        """Requests submitted again after an engine ended; one that is replayed twice counts twice."""
        self.quarantined = 0
        """Requests given up because they ended each engine that they were tried on."""
        self.weights_version = "1"
        """Of the weights that the next token is computed with."""
        self.weights_paths: dict[str, str | None] = {}
        """Where the weights of each version but the first were read from; None: they were given as tensors."""
        self.asleep = False
        """Whether weights and KV cache were let go; requests wait until they are back."""
        self.failure: EngineError | None = None
        """Why the engine is gone for good; None while it is not."""
        self.failure_callbacks: list[Callable[[EngineError], None]] = []
        """What a program has called when the engine is gone for good."""

    def launch(self) -> None:  # noqa: B027 - nothing, where no process has to be started
        """Begin to start the engine and return at once. Raises EngineError when the system can start no process."""

    def die(self, message: str) -> None:
        """The engine is gone for good. Only the first call counts."""
        if self.failure is None:
            self.failure = EngineGone(message)
            self.owner.fail(self.failure, self.number)
            for callback in self.failure_callbacks:
                try:
                    callback(self.failure)
                except Exception:  # a program's own
                    log.exception("a failure callback failed")

    @abstractmethod
    async def start(self) -> EngineInfo:
        """Start the engine and wait until it is ready.

        Raises ConfigError for a configuration that it cannot start with, EngineError when it ends while it starts.
        """

    @abstractmethod
    async def stop(self) -> None:
        """End the engine; open streams fail with EngineError."""

    @abstractmethod
    def send(self, requests: Sequence[EngineCoreRequest]) -> None:
        """Pass new requests on to the engine."""

    @abstractmethod
    def abort(self, request_id: str) -> None:
        """Tell the engine to stop computing a request, if it has it."""

    @abstractmethod
    async def snapshot(self) -> EngineView | None:
        """The requests and pages that the engine has after its current step; None if it ends before it answers. Call
        it only while the engine is responsive."""

    @abstractmethod
    async def get_block_table(self, request_id: str) -> BlockTableView | None:
        """The block table of a request after the engine's current step; None if the engine does not have it, or ends
        before it answers. Call it only while the engine is responsive."""

    @abstractmethod
    async def call(self, content: bytes) -> list[bytes] | None:
        """Run something on every rank of every engine, as engine/common/executor.py writes it; None where an engine
        sleeps, or ends before it answers. Raises InvalidRequest where none takes calls."""

    @abstractmethod
    def reset_prefix_cache(self) -> None:
        """Let requests that are submitted from now on find no prefix of an earlier one."""

    @property
    @abstractmethod
    def responsive(self) -> bool:
        """Whether the engine would answer now; False while an ended engine process is being replaced."""

    @property
    @abstractmethod
    def healthy(self) -> bool:
        """As `responsive`, but true also of an engine that sleeps or changes its weights because it was told to."""

    @property
    def pid(self) -> int | None:
        """Of the engine's process, the first one of several; None where there is none."""
        return None

    @property
    def engines(self) -> Sequence[EngineState]:
        """Those that work beside each other, by their number."""
        return [EngineState(self.stats, self.responsive, self.asleep)]


class ExclusiveClient(EngineCoreClient):
    """One whose engine is nobody else's, and which can have its weights changed: see Weights, which calls these."""

    @abstractmethod
    async def rest(self, level: int) -> None:
        """Let weights and KV cache go: `asleep`."""

    @abstractmethod
    async def check(self, weights: str) -> None:
        """Raise ConfigError where `load` would refuse the weights at this path by what their files' headers say. While
        the engine sleeps, nothing is checked."""

    @abstractmethod
    async def load(self, weights: str | None, version: str) -> None:
        """Build the engine anew with the weights at this path, None: with those that it had."""
