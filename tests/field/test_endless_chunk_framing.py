"""Endless chunk framing is bounded. A user saw: unauthenticated clients sent endless trailers; the server took 4 GB and
kept it (issue 56, item 1).

Of the same kind: endless chunk extensions (Node's CVE-2024-22019), one-byte chunks, thousands of headers.
"""

from __future__ import annotations

import asyncio
import gc
import json
import weakref
from collections.abc import AsyncIterator

import pytest

from quire.server.http.connection import MAX_FRAMING_BYTES, MAX_HEAD_BYTES, MAX_HEADERS
from tests.server.fake import FakeEngine, hashed
from tests.server.hosted import Port, serving

LETTERS = hashed(b"abcdefgh")
BODY = json.dumps({"prompt": "a", "max_tokens": 2}).encode()
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n"
CHUNK = b"%x\r\n%s\r\n" % (len(BODY), BODY)
TRAILER = b"X-Filler: " + b"x" * 90 + b"\r\n"
PIECE = b"x" * 32_000


@pytest.fixture(scope="module")
async def port() -> AsyncIterator[Port]:
    async with serving(FakeEngine(LETTERS), max_body_size=1, api_key=["secret"]) as port:
        yield port


def head(*headers: bytes, key: bytes = b"secret") -> bytes:
    lines = (HEAD, b"Authorization: Bearer " + key, *headers)
    return b"\r\n".join([lines[0] + lines[1], *lines[2:], b"", b""])


def statuses(answer: bytes) -> list[int]:
    return [int(part[:3]) for part in answer.split(b"HTTP/1.1 ")[1:]]


ENDLESS = {
    "trailers": [b"0\r\n", *[TRAILER * 300] * 20],
    "trailers of five bytes": [b"0\r\n", *[b"a:b\r\n" * 6000] * 20],
    "one trailer's value": [b"0\r\nA: ", *[PIECE] * 20],
    "one trailer's name": [b"0\r\n", *[PIECE] * 20],
    "the extension of the first chunk": [b"1;", *[PIECE] * 20],
    "the extension of a later chunk": [CHUNK, b"1;a=", *[PIECE] * 20],
    "the extension of the last chunk": [CHUNK, b"0;a=", *[PIECE] * 20],
    "extensions of many chunks": [(b"1;" + b"a" * 1000 + b"\r\nx\r\n") * 30] * 80,
    "leading zeros of a chunk's size": [CHUNK, *[b"0" * 32_000] * 20],
    "chunks of a byte": [b"1\r\nx\r\n" * 5000] * 100,
}


@pytest.mark.parametrize("name", ENDLESS)
@pytest.mark.parametrize("key", [b"secret", b"wrong"])
async def test_endless_chunk_framing_is_rejected_within_bounds(port: Port, name: str, key: bytes) -> None:
    """Also if the application has answered long before, as it does for a wrong key."""
    sent = 0

    async def counted() -> bytes:
        nonlocal sent
        reader, writer = await asyncio.open_connection("127.0.0.1", port.number)
        answer = asyncio.create_task(reader.read())
        for piece in [head(key=key), *ENDLESS[name]]:
            writer.write(piece)
            await writer.drain()
            sent += len(piece)
            await asyncio.wait([answer], timeout=0.001)
            if answer.done():
                break
        told = await asyncio.wait_for(answer, 10)
        writer.close()
        return told

    answer = await counted()
    first = statuses(answer)[0]
    assert first in ((401,) if key == b"wrong" else (400, 431)), answer
    assert sent < 2 * (MAX_FRAMING_BYTES + MAX_HEAD_BYTES)


@pytest.mark.parametrize("count", [1, 20])
async def test_trailers_are_ignored_and_not_used_as_headers(port: Port, count: int) -> None:
    """A trailer is not a header: it gives no key."""
    close = b"Connection: close\r\n\r\n"
    last = b"GET /health HTTP/1.1\r\nHost: localhost\r\n" + close
    trailers = b"Authorization: Bearer secret\r\nHost: evil\r\n" + TRAILER * count
    answer = await port.send(head() + CHUNK + b"0\r\n" + trailers + b"\r\n" + last)
    assert statuses(answer) == [200, 200]
    keyless = HEAD + b"\r\n" + CHUNK + b"0\r\n" + trailers + b"\r\n" + last
    assert statuses(await port.send(keyless)) == [401, 200]


async def test_request_with_too_many_headers_is_rejected_with_431(port: Port) -> None:
    get = b"GET /health HTTP/1.1\r\nConnection: close\r\n"
    assert statuses(await port.send(get + b"a: b\r\n" * (MAX_HEADERS - 1) + b"\r\n")) == [200]
    answer = await port.send(get + b"a: b\r\n" * MAX_HEADERS + b"\r\n")
    assert statuses(answer) == [431]
    assert str(MAX_HEADERS).encode() in answer
    trailers = b"a: b\r\n" * MAX_HEADERS
    assert statuses(await port.send(head() + CHUNK + b"0\r\n" + trailers + b"\r\n"))[0] in (200, 431)


async def test_large_body_in_small_chunks_is_accepted(port: Port) -> None:
    """A client that writes JSON incrementally sends a chunk for each part."""
    body = b'{"prompt": "a", "max_tokens": 2' + b" " * 900_000 + b"}"
    chunks = b"".join(b"18\r\n%s\r\n" % body[at : at + 24].ljust(24) for at in range(0, len(body), 24))
    close = b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    assert statuses(await port.send(head() + chunks + b"0\r\n\r\n" + close)) == [200, 200]


@pytest.mark.parametrize("ends", ["closes", "resets"])
async def test_closed_connection_is_freed_without_garbage_collection(port: Port, ends: str) -> None:
    """Not only when the garbage collector finds reference cycles."""
    gc.collect()
    gc.disable()
    try:
        before = set(port.server.server_state.connections)
        reader, writer = await asyncio.open_connection("127.0.0.1", port.number)
        writer.write(head() + CHUNK + b"0\r\n\r\n" + head())
        await reader.readuntil(b"\r\n\r\n")
        writer.write(CHUNK + b"0\r\n" + TRAILER * 5)
        (connection,) = (weakref.ref(each) for each in port.server.server_state.connections - before)
        if ends == "resets":
            writer.transport.abort()
        else:
            writer.close()
        async with asyncio.timeout(20):
            while connection() is not None:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
    finally:
        gc.enable()


async def test_error_of_pipelined_request_follows_earlier_response(port: Port) -> None:
    """The error once came in the middle of another request's response, and clients would read it as part of that."""
    stream = json.dumps({"prompt": "a", "max_tokens": 400, "ignore_eos": True, "stream": True}).encode()
    long = b"POST /v1/completions HTTP/1.1\r\nAuthorization: Bearer secret\r\nContent-Length: %d\r\n\r\n"
    answer = await port.send(long % len(stream) + stream, head() + b"1;" + PIECE * 5, pause=0.02)
    assert statuses(answer) == [200, 431]
    assert b"data: [DONE]\n\n\r\n0\r\n\r\nHTTP/1.1 431" in answer


async def test_disconnect_with_pipelined_requests_aborts_running_request() -> None:
    engine = FakeEngine(LETTERS, max_model_len=100_000, step_seconds=0.002)
    async with serving(engine) as port:
        body = json.dumps({"prompt": "a", "max_tokens": 90_000, "ignore_eos": True, "stream": True}).encode()
        post = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)
        reader, writer = await asyncio.open_connection("127.0.0.1", port.number)
        writer.write(post * 3)
        await reader.readuntil(b"data: ")
        writer.transport.abort()
        async with asyncio.timeout(20):
            while engine.running or engine.owner.num_open:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        assert len(engine.seen) == 1
