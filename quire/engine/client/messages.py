"""Messages between API processes, the leader and the engine process: msgpack over ZeroMQ on Unix sockets. Everything
except requests, aborts and outputs is a utility call (engine/processes/utility_calls.py).
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
"""Topic under which API processes report counts that outlive them."""
LEADER = ""
CANNOT_ANSWER = "the server's main process could not answer; see its log"


class Submit(msgspec.Struct, frozen=True, tag=True, array_like=True):
    requests: list[EngineCoreRequest]
    images: list[Image] = []


class Abort(msgspec.Struct, frozen=True, tag=True, array_like=True):
    ids: list[str]


class Stepped(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Outputs of a step, or of aborted and refused requests."""

    outputs: list[EngineCoreOutput]
    stats: EngineStats
    step: StepRecord | None = None
    """None if the step is not recorded."""


class SharedStep(msgspec.Struct, frozen=True, array_like=True):
    """The part of a Stepped that concerns one API process."""

    outputs: list[EngineCoreOutput]
    record: StepRecord | None
    """Sent to all API processes, even to those without a request in the step."""
    replica: int
    weights_version: str
    counts: bool
    """True for only one API process, which counts the step in its metrics."""


class SharedSteps(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The steps that the leader received in one iteration of its event loop, in order."""

    steps: list[SharedStep]
    stats: list[EngineStats]


class EngineStarted(msgspec.Struct, frozen=True, array_like=True):
    info: EngineInfo
    failure: str | None = None


class SharedEngineState(msgspec.Struct, frozen=True, array_like=True):
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
    open: dict[str, int]
    queued_tokens: int


class EngineCoreMethods(ABC):
    @abstractmethod
    def take_snapshot(self) -> EngineView: ...

    @abstractmethod
    def get_block_table(self, request_id: str) -> BlockTableView | None:
        """None if the id is unknown."""

    @abstractmethod
    def reset_prefix_cache(self) -> None: ...

    @abstractmethod
    def run_collective_rpc(self, content: bytes) -> list[bytes]:
        """See engine/common/executor.py. Raises InvalidRequest if calls are unsupported."""

    @abstractmethod
    def check_weights(self, config: str) -> None:
        """Raise a QuireError if `load_weights` would not find weights of the model's shapes."""

    @abstractmethod
    def load_weights(self, config: str) -> EngineStarted:
        """Rebuilds the engine without its requests. If this raises a QuireError, nothing has changed."""

    @abstractmethod
    def sleep(self) -> None:
        """Release the weights, the KV cache and the requests."""


class LeaderMethods(WeightChanges):
    @abstractmethod
    def join(self) -> None:
        """The API process is welcomed once the engine is ready."""

    @abstractmethod
    def announce(self, announcement: str) -> None:
        """`announcement`: text that the server prints when it is ready."""

    @abstractmethod
    def report_failed_start(self, fault: Fault) -> None: ...

    @abstractmethod
    def reset_prefix_cache(self) -> None: ...

    @abstractmethod
    async def take_snapshot(self) -> EngineView | None:
        """None if no engine answers."""

    @abstractmethod
    async def get_block_table(self, request_id: str) -> BlockTableView | None:
        """None if no responsive engine has the request."""

    @abstractmethod
    async def ask(self, topic: str, body: bytes, to: str | None) -> list[bytes]:
        """`to` is the identity of one process, or LEADER; None asks all others."""


class ApiProcessMethods(ABC):
    """Calls keep their order relative to steps."""

    @abstractmethod
    def welcome(self, info: EngineInfo, state: SharedEngineState, inherited: bytes | None) -> None:
        """`inherited`: the last LASTING answer of the API process that this one replaces."""

    @abstractmethod
    def update_state(self, state: SharedEngineState) -> None: ...

    @abstractmethod
    def lose_engine(self, replica: int, ids: list[str] | None) -> None:
        """If `ids` is None, all open requests wait for another engine."""

    @abstractmethod
    def fail_requests(self, ids: list[str], fault: Fault) -> None: ...

    @abstractmethod
    async def answer(self, topic: str, body: bytes) -> bytes | None: ...


ToEngine = Submit | Abort | UtilityCall
FromEngine = Stepped | UtilityResult
ToLeader = Submit | Abort | Alive | UtilityCall | UtilityResult
FromLeader = SharedSteps | UtilityCall | UtilityResult

decode_to_engine = msgspec.msgpack.Decoder(ToEngine).decode
decode_from_engine = msgspec.msgpack.Decoder(FromEngine).decode
decode_to_leader = msgspec.msgpack.Decoder(ToLeader).decode
decode_from_leader = msgspec.msgpack.Decoder(FromLeader).decode
decode_started = msgspec.msgpack.Decoder(EngineStarted).decode


def detach_images(requests: Sequence[EngineCoreRequest]) -> tuple[list[EngineCoreRequest], list[Image]]:
    """An image that several requests share is sent only once."""
    images = {image.digest: image for request in requests for image in request.images}
    bare = [msgspec.structs.replace(each, images=()) if each.images else each for each in requests]
    return bare, list(images.values())


def attach_images(requests: list[EngineCoreRequest], images: list[Image]) -> list[EngineCoreRequest]:
    if not images:
        return requests
    known = {image.digest: image for image in images}
    requests_with_images = []
    for each in requests:
        request_images = tuple(known[digest] for digest in dict.fromkeys(span.digest for span in each.spans))
        requests_with_images.append(msgspec.structs.replace(each, images=request_images) if request_images else each)
    return requests_with_images
