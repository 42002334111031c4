"""The messages between API processes, the process that has the engine's client (the leader) and the engine's own:
msgpack over ZeroMQ on Unix sockets.

Requests, their ends and their outputs flow, each kind in a message of its own. For all else there are utility calls
(engine/processes/utility_calls.py): what each process answers is declared here.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import msgspec

from quire.engine.client.engine_core_client import EngineState
from quire.engine.client.weights import WeightChanges
from quire.engine.common.types import EngineCoreOutput, EngineCoreRequest, EngineInfo, Image
from quire.engine.core.stats import BlockTableView, EngineStats, EngineView, StepRecord
from quire.engine.processes.heartbeat import Alive
from quire.engine.processes.utility_calls import Fault, UtilityCall, UtilityResult

LASTING = "metrics"
"""The topic of questions whose answers still count after the end of the API process that gave them."""
LEADER = ""
"""What stands for the leader, where one process is asked."""
CANNOT_ANSWER = "the server's main process could not answer; see its log"


class Submit(msgspec.Struct, frozen=True, tag=True, array_like=True):
    requests: list[EngineCoreRequest]
    """Without their images."""
    images: list[Image] = []


class Abort(msgspec.Struct, frozen=True, tag=True, array_like=True):
    ids: list[str]


class Stepped(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """What the engine produced in one step, or of adds and aborts."""

    outputs: list[EngineCoreOutput]
    stats: EngineStats
    step: StepRecord | None = None
    """None where no step was learnt from."""


class Part(msgspec.Struct, frozen=True, array_like=True):
    """What one step gave to the requests of one API process, or what adds and aborts did."""

    outputs: list[EngineCoreOutput]
    record: StepRecord | None
    """All API processes get it, those too that have no request in the step."""
    replica: int
    weights_version: str
    counts: bool
    """Whether this API process is the one that counts the step in its metrics."""


class SharedSteps(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """One or several steps, in their order: all that came in one turn of the leader's event loop."""

    parts: list[Part]
    stats: list[EngineStats]
    """Of each engine, after the last of them."""


class EngineStarted(msgspec.Struct, frozen=True, array_like=True):
    """The result of START, and of `load_weights`: an engine has started, or was built anew; it has no requests."""

    info: EngineInfo
    failure: str | None = None
    """Why it is one of the configuration before, if it is not of the one that was to be loaded."""


class State(msgspec.Struct, frozen=True, array_like=True):
    """How the engines are."""

    engines: list[EngineState]
    responsive: bool
    healthy: bool
    asleep: bool
    refusing: bool
    weights_version: str
    weights_path: str | None
    """See EngineCoreClient.weights_paths."""
    deaths: int
    replays: int
    quarantined: int
    failure: Fault | None
    """Why they are gone for good."""
    open: dict[str, int]
    """Requests that have not ended, of all API processes, by tenant."""
    queued_tokens: int
    """Prompt tokens of those that have given no output."""


class EngineCoreMethods(ABC):
    """What an engine process answers, between two steps. `config`: an EngineConfig as JSON."""

    @abstractmethod
    def take_snapshot(self) -> EngineView: ...

    @abstractmethod
    def get_block_table(self, request_id: str) -> BlockTableView | None:
        """Of a running or waiting request; None for an unknown id."""

    @abstractmethod
    def reset_prefix_cache(self) -> None:
        """Let requests from now on find no prefix of an earlier one."""

    @abstractmethod
    def run_collective_rpc(self, content: bytes) -> list[bytes]:
        """Run something on every rank: see engine/common/executor.py. Returns what each gives; raises InvalidRequest
        where none takes calls."""

    @abstractmethod
    def check_weights(self, config: str) -> None:
        """Raise a QuireError where `load_weights` would not find weights of the model's shape."""

    @abstractmethod
    def load_weights(self, config: str) -> EngineStarted:
        """Let weights, KV cache and requests go, and build the engine anew. Raises a QuireError where all is as
        before."""

    @abstractmethod
    def sleep(self) -> None:
        """Let weights, KV cache and requests go."""


class LeaderMethods(WeightChanges):
    """What the leader answers an API process, and what it is told by it."""

    @abstractmethod
    def join(self) -> None:
        """An API process is there; it is welcomed when the engine is ready."""

    @abstractmethod
    def announce(self, announcement: str) -> None:
        """An API process listens. `announcement`: what the server prints when it is ready."""

    @abstractmethod
    def report_failed_start(self, fault: Fault) -> None:
        """An API process cannot start, and ends."""

    @abstractmethod
    def reset_prefix_cache(self) -> None: ...

    @abstractmethod
    async def take_snapshot(self) -> EngineView | None:
        """None where no engine could be asked."""

    @abstractmethod
    async def get_block_table(self, request_id: str) -> BlockTableView | None:
        """None if no engine that could be asked has the request."""

    @abstractmethod
    async def ask(self, topic: str, body: bytes, to: str | None) -> list[bytes]:
        """The answers of all other API processes, or of one. `to`: who alone is asked: the identity of an API process,
        or LEADER; None: all others."""


class ApiProcessMethods(ABC):
    """What an API process answers the leader, and what it is told by it. It is told in the order in which steps come,
    too."""

    @abstractmethod
    def welcome(self, info: EngineInfo, state: State, inherited: bytes | None) -> None:
        """The engine is ready. `inherited`: the last LASTING answer of the API process that this one replaces."""

    @abstractmethod
    def update_state(self, state: State) -> None:
        """The state of the engines has changed."""

    @abstractmethod
    def lose_engine(self, replica: int, ids: list[str] | None) -> None:
        """The requests that an engine had wait for another one. None: all that are open."""

    @abstractmethod
    def fail_requests(self, ids: list[str], fault: Fault) -> None:
        """The requests of a call have ended with an error."""

    @abstractmethod
    async def answer(self, topic: str, body: bytes) -> bytes | None:
        """Another API process, or the leader, asks."""


ToEngine = Submit | Abort | UtilityCall
FromEngine = Stepped | UtilityResult
ToLeader = Submit | Abort | Alive | UtilityCall | UtilityResult
FromLeader = SharedSteps | UtilityCall | UtilityResult

decode_to_engine = msgspec.msgpack.Decoder(ToEngine).decode
decode_from_engine = msgspec.msgpack.Decoder(FromEngine).decode
decode_to_leader = msgspec.msgpack.Decoder(ToLeader).decode
decode_from_leader = msgspec.msgpack.Decoder(FromLeader).decode
decode_started = msgspec.msgpack.Decoder(EngineStarted).decode


def apart(requests: Sequence[EngineCoreRequest]) -> tuple[list[EngineCoreRequest], list[Image]]:
    """Requests without their images, and these: one that several of them have, as the choices of a call do, goes
    once."""
    images = {image.digest: image for request in requests for image in request.images}
    bare = [msgspec.structs.replace(each, images=()) if each.images else each for each in requests]
    return bare, list(images.values())


def together(requests: list[EngineCoreRequest], images: list[Image]) -> list[EngineCoreRequest]:
    """The requests as they were before `apart`."""
    if not images:
        return requests
    known = {image.digest: image for image in images}
    found = []
    for each in requests:
        own = tuple(known[digest] for digest in dict.fromkeys(span.digest for span in each.spans))
        found.append(msgspec.structs.replace(each, images=own) if own else each)
    return found
