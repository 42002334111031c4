"""The messages between the API process and the engine process: msgpack over a ZeroMQ pair on a Unix socket."""

from __future__ import annotations

import msgspec

from quire.engine.types import EngineInfo, EngineSnapshot, EngineStats, Request, RequestOutput, StepRecord


class Submit(msgspec.Struct, frozen=True, tag=True):
    requests: list[Request]


class Abort(msgspec.Struct, frozen=True, tag=True):
    ids: list[str]


class SnapshotRequest(msgspec.Struct, frozen=True, tag=True):
    """Asks for one SnapshotTaken, which is made between two steps."""


class Ready(msgspec.Struct, frozen=True, tag=True, array_like=True):
    info: EngineInfo


class Failed(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The engine cannot start with this configuration, and its process ends."""

    message: str
    param: str | None = None
    """The configuration key at fault, if one is."""


class Stepped(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """What the engine produced in one step, or of adds and aborts."""

    outputs: list[RequestOutput]
    stats: EngineStats
    step: StepRecord | None = None
    """None where no step was learnt from."""


class SnapshotTaken(msgspec.Struct, frozen=True, tag=True, array_like=True):
    view: EngineSnapshot


ToEngine = Submit | Abort | SnapshotRequest
FromEngine = Ready | Failed | Stepped | SnapshotTaken

encode = msgspec.msgpack.Encoder().encode
decode_to_engine = msgspec.msgpack.Decoder(ToEngine).decode
decode_from_engine = msgspec.msgpack.Decoder(FromEngine).decode
