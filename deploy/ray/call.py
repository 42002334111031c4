"""One request on its way from the gateway to a replica, and what of its answer comes back first."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import msgspec

from quire.engine.common import random_source

Headers = list[tuple[bytes, bytes]]
"""As ASGI has them: names in lower case."""

RESUMABLE = frozenset({"/v1/chat/completions", "/v1/completions"})
"""Where a stream that a replica's end cuts off is continued by another: see resume.py."""
BLOCK = 128
"""Bytes of a prompt's JSON that are looked up together."""
MAX_BLOCKS = 128
_HOP_BY_HOP = frozenset({b"connection", b"content-length", b"expect", b"keep-alive", b"transfer-encoding", b"upgrade"})


@dataclass(frozen=True, slots=True)
class Call:
    method: str
    path: str
    query: bytes
    headers: Headers
    client: tuple[str, int] | None
    body: bytes
    prefix: tuple[int, ...] = ()
    """A hash of the prompt's first block, of its first two, and so on: valid in the process that made the call."""
    resumable: bool = False
    """Whether it asks for a stream that can be continued."""


@dataclass(frozen=True, slots=True)
class Head:
    status: int
    headers: Headers

    def named(self, name: bytes) -> bytes | None:
        """The value of a header; None where there is none."""
        return next((value for each, value in self.headers if each.lower() == name), None)

    @property
    def is_stream(self) -> bool:
        return any(name == b"content-type" and value.startswith(b"text/event-stream") for name, value in self.headers)


class _Asked(msgspec.Struct):
    stream: bool | None = None
    seed: int | None = None
    model: msgspec.Raw = msgspec.Raw()
    tools: msgspec.Raw = msgspec.Raw()
    system: msgspec.Raw = msgspec.Raw()
    messages: msgspec.Raw = msgspec.Raw()
    prompt: msgspec.Raw = msgspec.Raw()
    input: msgspec.Raw = msgspec.Raw()


def make_call(
    scope: Mapping[str, object], headers: Iterable[tuple[bytes, bytes]], body: bytes, *, seeds: bool = True
) -> Call:
    """The call of an ASGI request. One that is resumable has a seed, which is drawn here if need be: two replicas then
    compute the same tokens. `seeds`: False where a journal has them, and continues streams: none is resumable then."""
    path, query, client = scope["path"], scope["query_string"], scope.get("client")
    assert isinstance(path, str)
    assert isinstance(query, bytes)
    kept = [(name, value) for name, value in headers if name not in _HOP_BY_HOP]
    try:
        asked = msgspec.json.decode(body, type=_Asked)
    except (msgspec.MsgspecError, UnicodeError):
        asked = None  # the replica will say what is wrong with it
    resumable = seeds and asked is not None and bool(asked.stream) and path in RESUMABLE
    if asked is not None and resumable and asked.seed is None:
        body = with_seed(body, random_source.randbits(53))
    if body:
        kept.append((b"content-length", b"%d" % len(body)))
    return Call(
        method=str(scope["method"]),
        path=path,
        query=query,
        headers=kept,
        client=(str(client[0]), int(client[1])) if isinstance(client, tuple | list) else None,
        body=body,
        prefix=() if asked is None else prefix_hashes(_key(kept), asked),
        resumable=resumable,
    )


def continued(call: Call, stream: bytes, last: bytes | None) -> Call:
    """The call for what follows an event of a stream that is in the journal. `last`: its id; None: for all of it."""
    dropped = (b"content-length", b"content-type", b"last-event-id")
    headers = [(name, value) for name, value in call.headers if name not in dropped]
    if last is not None:
        headers.append((b"last-event-id", last))
    return replace(call, method="GET", path=f"/v1/streams/{stream.decode()}", query=b"", headers=headers, body=b"")


def with_seed(body: bytes, seed: int) -> bytes:
    """A JSON object that has a field, with `seed` behind it: where a name is there twice, the last one counts."""
    return b'%b,"seed":%d}' % (body.rstrip()[:-1], seed)


def prefix_hashes(key: bytes, asked: _Asked) -> tuple[int, ...]:
    """Of what a prompt is made of, in the order in which templates write it. Different keys share no cached pages."""
    parts = (asked.model, asked.tools, asked.system, asked.messages or asked.prompt or asked.input)
    text = b"\n".join(bytes(part) for part in parts)[: BLOCK * MAX_BLOCKS]
    hashes, last = [], hash(key)
    for start in range(0, len(text) - BLOCK + 1, BLOCK):
        last = hash((last, text[start : start + BLOCK]))
        hashes.append(last)
    return tuple(hashes)


def _key(headers: Headers) -> bytes:
    return b"\n".join(value for name, value in headers if name in (b"authorization", b"x-api-key"))
