"""A request from the gateway to a replica, and the head of its answer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import msgspec

from quire.engine.common import random_source

Headers = list[tuple[bytes, bytes]]
"""As in ASGI: lower-case names."""

RESUMABLE = frozenset({"/v1/chat/completions", "/v1/completions"})
"""Another replica continues these streams if theirs ends; see resume.py."""
BLOCK = 128
"""Bytes of a prompt's JSON per hash."""
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
    """Hashes of the prompt's first block, first two, and so on; valid only in this process."""
    resumable: bool = False


@dataclass(frozen=True, slots=True)
class Head:
    status: int
    headers: Headers

    def named(self, name: bytes) -> bytes | None:
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
    """The call of an ASGI request. A resumable one gets a seed if it has none, so that two replicas compute the same
    tokens. `seeds`: False if a journal has seeds and continues streams; then no call is resumable.
    """
    path, query, client = scope["path"], scope["query_string"], scope.get("client")
    assert isinstance(path, str)
    assert isinstance(query, bytes)
    kept = [(name, value) for name, value in headers if name not in _HOP_BY_HOP]
    try:
        asked = msgspec.json.decode(body, type=_Asked)
    except (msgspec.MsgspecError, UnicodeError):
        asked = None  # the replica reports the error
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
    """The call for what follows a journaled stream's event. `last`: its id; None for the whole stream."""
    dropped = (b"content-length", b"content-type", b"last-event-id")
    headers = [(name, value) for name, value in call.headers if name not in dropped]
    if last is not None:
        headers.append((b"last-event-id", last))
    return replace(call, method="GET", path=f"/v1/streams/{stream.decode()}", query=b"", headers=headers, body=b"")


def with_seed(body: bytes, seed: int) -> bytes:
    """Appends `seed` to a non-empty JSON object: of duplicate names the last one counts."""
    return b'%b,"seed":%d}' % (body.rstrip()[:-1], seed)


def prefix_hashes(key: bytes, asked: _Asked) -> tuple[int, ...]:
    """Hashes in the order in which templates write a prompt. Different keys share no cached blocks."""
    parts = (asked.model, asked.tools, asked.system, asked.messages or asked.prompt or asked.input)
    text = b"\n".join(bytes(part) for part in parts)[: BLOCK * MAX_BLOCKS]
    hashes, last = [], hash(key)
    for start in range(0, len(text) - BLOCK + 1, BLOCK):
        last = hash((last, text[start : start + BLOCK]))
        hashes.append(last)
    return tuple(hashes)


def _key(headers: Headers) -> bytes:
    return b"\n".join(value for name, value in headers if name in (b"authorization", b"x-api-key"))
