"""What the API process and the engine process say to each other: msgpack over a ZeroMQ pair on a Unix socket."""

from __future__ import annotations

import msgspec

from engine.types import EngineInfo, EngineOutputs, EngineView, Request


class Submit(msgspec.Struct, frozen=True, tag=True):
    requests: list[Request]


class Abort(msgspec.Struct, frozen=True, tag=True):
    ids: list[str]


class Look(msgspec.Struct, frozen=True, tag=True):
    """Asks for one Seen, between two steps."""


class Ready(msgspec.Struct, frozen=True, tag=True):
    info: EngineInfo


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The engine cannot start with this configuration; it ends after this."""

    message: str
    param: str | None = None
    """The configuration key at fault, if it is one."""


class Stepped(msgspec.Struct, frozen=True, tag=True):
    outputs: EngineOutputs


class Seen(msgspec.Struct, frozen=True, tag=True):
    view: EngineView


ToEngine = Submit | Abort | Look
FromEngine = Ready | Failed | Stepped | Seen

_encoder = msgspec.msgpack.Encoder()
_to_engine = msgspec.msgpack.Decoder(ToEngine)
_from_engine = msgspec.msgpack.Decoder(FromEngine)


def encode(message: ToEngine | FromEngine) -> bytes:
    return _encoder.encode(message)


def decode_to_engine(data: bytes) -> ToEngine:
    return _to_engine.decode(data)


def decode_from_engine(data: bytes) -> FromEngine:
    return _from_engine.decode(data)
