"""The messages between a server's hub, which has the engine, and its API processes: msgpack over ZeroMQ on a Unix
socket."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from quire.engine.common import errors
from quire.engine.common.errors import ConfigError, ModelError, QuireError
from quire.engine.common.types import EngineCoreOutput, EngineInfo
from quire.engine.core.stats import EngineStats, StepRecord
from quire.engine.link.engine_messages import Abort, ResetPrefixCache, Submit
from quire.engine.link.link import EngineState
from quire.engine.link.weights import Mode

LASTING = "metrics"
"""The topic of questions whose answers still count after the end of the API process that gave them."""

HUB = ""
"""What stands for the hub's own process, where one is asked."""
SNAPSHOT, CHANGE = "snapshot", "change"
"""Topics of questions to it: one that asks for an EngineView, or for None where no engine could be asked; and a
Change."""


class Fault(msgspec.Struct, frozen=True):
    """An error on its way to another process."""

    kind: str
    """The name of its class in engine/common/errors.py."""
    message: str
    param: str | None = None

    @classmethod
    def of(cls, error: QuireError) -> Fault:
        return cls(type(error).__name__, error.message, error.param)

    def error(self) -> QuireError:
        kind = getattr(errors, self.kind)
        if issubclass(kind, ModelError):  # which is made otherwise, and says no more
            kind = ConfigError
        made = kind(self.message, param=self.param)
        assert isinstance(made, QuireError)
        return made


class Change(msgspec.Struct, frozen=True):
    """A change of the weights, as the methods of Weights make them: the body of a question to HUB."""

    do: Literal["sleep", "wake_up", "update"]
    level: int = 1
    mode: Mode = "keep"
    refuse: bool = False
    path: str = ""
    version: str | None = None


class Changed(msgspec.Struct, frozen=True):
    """Its answer."""

    version: str
    fault: Fault | None


class Hello(msgspec.Struct, frozen=True, tag=True):
    """An API process is there; answered by Welcome when the engine is ready."""


class Alive(msgspec.Struct, frozen=True, tag=True):
    """A sign of life."""


class Serving(msgspec.Struct, frozen=True, tag=True):
    """An API process listens."""

    announcement: str
    """What the server prints when it is ready."""


class NotStarted(msgspec.Struct, frozen=True, tag=True):
    """An API process cannot start, and ends."""

    fault: Fault


class Ask(msgspec.Struct, frozen=True, tag=True):
    """A question to all other API processes, or to one; answered by Answers."""

    number: int
    topic: str
    body: bytes
    to: str | None = None
    """Who alone is asked: the identity of an API process, or HUB; None: all others."""


class Answer(msgspec.Struct, frozen=True, tag=True):
    """To a Question."""

    number: int
    body: bytes | None


class Part(msgspec.Struct, frozen=True, array_like=True):
    """What one step gave to the requests of one API process, or what adds and aborts did."""

    outputs: list[EngineCoreOutput]
    record: StepRecord | None
    """All API processes get it, those too that have no request in the step."""
    replica: int
    weights_version: str
    counts: bool
    """Whether this API process is the one that counts the step in its metrics."""


class Stepped(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """One or several steps, in their order: all that came in one turn of the hub's event loop."""

    parts: list[Part]
    stats: list[EngineStats]
    """Of each engine, after the last of them."""


class EngineDied(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The requests that an engine had wait for another one."""

    replica: int
    ids: Sequence[str] | None
    """None: all that are open."""


class Failed(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The requests of a call have ended with an error."""

    ids: list[str]
    fault: Fault


class State(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """How the engines are; sent when it changes."""

    engines: list[EngineState]
    responsive: bool
    healthy: bool
    asleep: bool
    refusing: bool
    weights_version: str
    weights_path: str | None
    """See Link.weights_paths."""
    deaths: int
    replays: int
    quarantined: int
    failure: Fault | None
    """Why they are gone for good."""
    open: dict[str, int]
    """Requests that have not ended, of all API processes, by tenant."""
    queued_tokens: int
    """Prompt tokens of those that have given no output."""


class Welcome(msgspec.Struct, frozen=True, tag=True, array_like=True):
    info: EngineInfo
    state: State
    inherited: bytes | None
    """The last LASTING answer of the API process that this one replaces."""


class Question(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Of another API process; answered by Answer."""

    number: int
    topic: str
    body: bytes


class Answers(msgspec.Struct, frozen=True, tag=True, array_like=True):
    number: int
    bodies: list[bytes]


ToHub = Hello | Alive | Serving | NotStarted | Submit | Abort | ResetPrefixCache | Ask | Answer
FromHub = Welcome | Stepped | EngineDied | Failed | State | Question | Answers

decode_to_hub = msgspec.msgpack.Decoder(ToHub).decode
decode_from_hub = msgspec.msgpack.Decoder(FromHub).decode
