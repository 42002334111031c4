from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any
from urllib.parse import quote

import msgspec

from quire.engine.processes.utility_calls import method_call_codec as method_call_codec

encode_json = msgspec.json.Encoder().encode
"""Raises UnicodeEncodeError for an unpaired surrogate."""

EVENT_PREFIX, EVENT_END = b"data: ", b"\n\n"
DONE_EVENT = b"data: [DONE]\n\n"


PING_EVENT = b": ping\n\n"


def encode_event(kind: str, data: Mapping[str, object], **raw_fields: bytes) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), encode_with_raw_fields(data, **raw_fields))


def encode_with_raw_fields(fields: Mapping[str, object], **raw_fields: bytes) -> bytes:
    """`fields` must not be empty. `raw_fields` are already JSON."""
    more = [b',"%b":%b' % (name.encode(), value) for name, value in raw_fields.items()]
    return b"%b%b}" % (encode_json(fields)[:-1], b"".join(more))


def join_json_array(encoded: Iterable[bytes]) -> bytes:
    return b"[%b]" % b",".join(encoded)


def encode_ascii_json(value: object) -> bytes:
    """Also encodes unpaired surrogates, which clients may send and UTF-8 cannot encode."""
    return json.dumps(value).encode()


def escape_log_text(text: str) -> str:
    return "".join(char if char.isprintable() else quote(char, errors="replace") for char in text)


encode_msgpack = msgspec.msgpack.Encoder().encode


def method_handler(owner: object, method: Callable[..., Any]) -> Callable[[bytes], Awaitable[bytes | None]]:
    """An empty body means no arguments."""

    async def handle_call(body: bytes) -> bytes | None:
        arguments = method_call_codec(method).arguments_decoder.decode(body) if body else None
        result = method(owner, **({} if arguments is None else msgspec.structs.asdict(arguments)))
        result = await result if isinstance(result, Awaitable) else result
        return None if result is None else encode_msgpack(result)

    return handle_call
