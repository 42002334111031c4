"""What the API process and the engine process say to each other: msgpack over a ZeroMQ pair on a Unix socket."""

from __future__ import annotations

import msgspec

from quire.engine.types import EngineInfo, EngineSnapshot, EngineStats, Request, RequestOutput, StepRecord


class Submit(msgspec.Struct, frozen=True, tag=True):
    requests: list[Request]


class Abort(msgspec.Struct, frozen=True, tag=True):
    ids: list[str]


class SnapshotRequest(msgspec.Struct, frozen=True, tag=True):
    """Asks for one SnapshotTaken, between two steps."""


class Ready(msgspec.Struct, frozen=True, tag=True, array_like=True):
    info: EngineInfo


class Failed(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The engine cannot start with this configuration; it ends after this."""

    message: str
    param: str | None = None
    """The configuration key at fault, if it is one."""


class Stepped(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """What one step produced."""

    outputs: list[RequestOutput]
    stats: EngineStats
    step: StepRecord | None = None
    """None where only adds and aborts gave outputs."""


class SnapshotTaken(msgspec.Struct, frozen=True, tag=True, array_like=True):
    view: EngineSnapshot


ToEngine = Submit | Abort | SnapshotRequest
FromEngine = Ready | Failed | Stepped | SnapshotTaken

encode = msgspec.msgpack.Encoder().encode
decode_to_engine = msgspec.msgpack.Decoder(ToEngine).decode
decode_from_engine = msgspec.msgpack.Decoder(FromEngine).decode
