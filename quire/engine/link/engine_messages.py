"""The messages between the API process and the engine process: msgpack over a ZeroMQ pair on a Unix socket. Those that
a hub passes on to it go from an API process to the hub as they are (hub_messages.py)."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from quire.engine.common.errors import InvalidRequest
from quire.engine.common.types import EngineCoreOutput, EngineCoreRequest, EngineInfo, Image
from quire.engine.core.stats import EngineStats, EngineView, StepRecord


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


class Submit(msgspec.Struct, frozen=True, tag=True):
    requests: list[EngineCoreRequest]
    """Without their images."""
    images: list[Image] = []


class Abort(msgspec.Struct, frozen=True, tag=True):
    ids: list[str]


class SnapshotRequest(msgspec.Struct, frozen=True, tag=True):
    """Asks for one SnapshotTaken, which is made between two steps."""


class Call(msgspec.Struct, frozen=True, tag=True):
    """Run something on every rank, between two steps; answered by Called. `content`: see engine/common/executor.py."""

    content: bytes


class Sleep(msgspec.Struct, frozen=True, tag=True):
    """Let weights, KV cache and requests go; answered by Asleep."""


class Load(msgspec.Struct, frozen=True, tag=True):
    """Let them go, and build the engine anew; answered by Ready, or by Refused when all is as before."""

    config: str
    """An EngineConfig as JSON."""


class Check(msgspec.Struct, frozen=True, tag=True):
    """Say whether `Load` of this would find weights of the model's shape; answered by Checked, or by Refused."""

    config: str
    """An EngineConfig as JSON."""


class Checked(msgspec.Struct, frozen=True, tag=True, array_like=True):
    pass


class Ready(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """An engine has started, or was built anew; it has no requests."""

    info: EngineInfo
    failure: str | None = None
    """Why it is one of the configuration before, if it is not of the one that was to be loaded."""


class Asleep(msgspec.Struct, frozen=True, tag=True, array_like=True):
    pass


class Refused(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Nothing was loaded; what the engine had, it has."""

    message: str
    param: str | None = None
    """The configuration key at fault, if one is."""


class Failed(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The engine cannot start with this configuration, and its process ends."""

    message: str
    param: str | None = None
    """The configuration key at fault, if one is."""


class Stepped(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """What the engine produced in one step, or of adds and aborts."""

    outputs: list[EngineCoreOutput]
    stats: EngineStats
    step: StepRecord | None = None
    """None where no step was learnt from."""


class SnapshotTaken(msgspec.Struct, frozen=True, tag=True, array_like=True):
    view: EngineView


class Called(msgspec.Struct, frozen=True, tag=True, array_like=True):
    results: list[bytes]
    """Of each rank."""
    refused: str | None = None
    """Why nothing was called."""

    def checked(self) -> list[bytes]:
        """The results. Raises InvalidRequest where nothing was called."""
        if self.refused is not None:
            raise InvalidRequest(self.refused)
        return self.results


class ResetPrefixCache(msgspec.Struct, frozen=True, tag=True):
    """Let requests from now on find no prefix of an earlier one."""


ToEngine = Submit | Abort | SnapshotRequest | ResetPrefixCache | Call | Sleep | Load | Check
FromEngine = Ready | Failed | Stepped | SnapshotTaken | Called | Asleep | Refused | Checked

encode = msgspec.msgpack.Encoder().encode
decode_to_engine = msgspec.msgpack.Decoder(ToEngine).decode
decode_from_engine = msgspec.msgpack.Decoder(FromEngine).decode
