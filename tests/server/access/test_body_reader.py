"""Limits of request bodies: JSON nesting (compared with a JSON parser), size, and the memory of all bodies together."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.types import Message

from quire.engine.common.errors import Overloaded
from quire.server.access.body_reader import READ_BODY_SCOPE_KEY, UNCOUNTED_BYTES, BodyBuffer, BodyReader, BodyTimeouts
from quire.server.access.rate_limits import RateLimits
from quire.server.access.tenants import Tenant
from quire.server.resolve.parse import MAX_JSON_DEPTH, is_too_deep
from tests.server.api import open_api
from tests.server.fake import FakeEngine, hashed

SCALARS = st.none() | st.booleans() | st.integers() | st.text(alphabet='[]{}"\\x\u2201\ud800')
TREES = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text('[{"\\'), inner))


def depth(value: Any) -> int:
    if isinstance(value, dict):
        value = list(value.values())
    return 1 + max(map(depth, value), default=0) if isinstance(value, list) else 0


@given(TREES, st.integers(0, 2 * MAX_JSON_DEPTH), st.booleans())
@example(["[" * 300], 0, False)
@example({"[" * 300: "\\"}, MAX_JSON_DEPTH - 1, True)
def test_is_too_deep_equals_depth_of_parsed_json(tree: Any, levels: int, ascii_only: bool) -> None:
    for level in range(levels):
        tree = [tree] if level % 2 else {"a": tree}
    body = json.dumps(tree, ensure_ascii=ascii_only).encode(errors="surrogatepass")
    assert is_too_deep(body) is (depth(tree) > MAX_JSON_DEPTH)


@given(st.binary(max_size=300) | st.text(alphabet='[]{}",\\ ').map(str.encode))
def test_is_too_deep_accepts_invalid_json_without_error(body: bytes) -> None:
    is_too_deep(body)


def test_is_too_deep_ignores_brackets_in_unterminated_string() -> None:
    assert not is_too_deep(b'"' + b"[" * 1000)
    assert not is_too_deep(b'{"a": "\\"' + b"[" * 1000)
    assert is_too_deep(b"[" * 1000)


async def chunked_body(count: int) -> AsyncIterator[bytes]:
    """A body of `count` KiB, sent without a Content-Length."""
    yield b'{"prompt": "'
    for _ in range(count):
        yield b"x" * 1024
    yield b'"}'


@pytest.mark.few(2)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"])
async def test_bodies_over_size_or_depth_limit_are_rejected(path: str) -> None:
    async with open_api(FakeEngine(hashed(b"ab")), max_body_size=1 / 16, max_model_len=100_000) as api:
        headers = {"Content-Type": "application/json"}
        for content in (chunked_body(64), b'{"prompt": "' + b"x" * 65_536 + b'"}', b"x" * 65_537):
            answer = await api.http.post(path, content=content, headers=headers)
            assert answer.status_code == 413, answer.text
            error = answer.json()["error"]
            assert error["type"] == "invalid_request_error"
            assert "65536 bytes" in error["message"]
            assert "--max-body-size" in error["message"]
        for content in (b"[" * 101 + b"]" * 101, b'{"prompt": ' * 101, b"[" * 60_000):
            answer = await api.http.post(path, content=content, headers=headers)
            assert answer.status_code == 400
            assert answer.json()["error"]["message"] == "The body is nested more than 100 levels deep"
        assert not api.engine.seen
        answer = await api.http.post("/tokenize", content=chunked_body(63), headers=headers)
        assert answer.json()["count"] == 63 * 1024


class Sender:
    """A request whose body the test sends chunk by chunk."""

    def __init__(self, owner: str = "", length: int | None = None) -> None:
        headers = [(b"content-type", b"application/json")]
        if length is not None:
            headers.append((b"content-length", str(length).encode()))
        self._pieces: asyncio.Queue[Message] = asyncio.Queue()
        tenant = Tenant(owner, b"", RateLimits(None, None))
        self.request = Request({"type": "http", "headers": headers, "tenant": tenant}, self._pieces.get)

    def send(self, size: int, more: bool = False) -> Sender:
        self._pieces.put_nowait({"type": "http.request", "body": b"x" * size, "more_body": more})
        return self

    def leave(self) -> None:
        self._pieces.put_nowait({"type": "http.disconnect"})


KIB = 1024
MIB = 1024 * KIB


async def read_size(bodies: BodyReader, sender: Sender, until: asyncio.Event) -> int:
    """Return the body's size after the event; until then its memory stays reserved."""
    async with bodies.hold_request_body(sender.request) as body:
        await until.wait()
        return sum(map(len, body.chunks))


async def run_pending_tasks() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


IMPATIENT = BodyTimeouts(wait_seconds=0.2, check_interval=0.02, slow_after=0.05)


async def test_bodies_over_memory_budget_wait_unread_until_timeout() -> None:
    bodies, done = BodyReader(4 * MIB, 10 * MIB, IMPATIENT), asyncio.Event()
    large = [Sender(length=4 * MIB).send(4 * MIB) for _ in range(3)]
    readers = [asyncio.create_task(read_size(bodies, each, done)) for each in large]
    await run_pending_tasks()
    assert large[2]._pieces.qsize() == 1, "it is not read"
    small = Sender(length=10).send(10)
    async with asyncio.timeout(5):
        async with bodies.hold_request_body(small.request) as body:
            assert body.received_bytes == 10, "small ones wait for nobody"
    with pytest.raises(Overloaded):
        await readers[2]
    done.set()
    assert await asyncio.gather(*readers[:2]) == [4 * MIB] * 2
    assert await read_size(bodies, large[2], done) == 4 * MIB, "there is room again"


async def test_body_reader_reuses_body_of_scope_and_releases_reservation() -> None:
    """A multi-model server reads the body for the model's name, and the model's response may take minutes."""
    outer, inner = BodyReader(4 * MIB, 4 * MIB), BodyReader(2 * MIB, 2 * MIB)
    request = Sender(length=2 * MIB).send(2 * MIB).request
    async with outer.hold_request_body(request) as body:
        request.scope[READ_BODY_SCOPE_KEY] = body
        async with inner.hold_request_body(request) as inner_body:
            assert inner_body is body
            assert (outer.reserved_bytes, inner.reserved_bytes) == (2 * MIB, 0)
        assert (outer.reserved_bytes, body.chunks) == (0, [])
        async with outer.hold_request_body(Sender(length=4 * MIB).send(4 * MIB).request):
            pass
    assert outer.reserved_bytes == 0


async def test_released_budget_goes_to_smallest_waiting_body() -> None:
    bodies, done, later = BodyReader(4 * MIB, 4 * MIB), asyncio.Event(), asyncio.Event()
    reader = asyncio.create_task(read_size(bodies, Sender(length=3 * MIB).send(3 * MIB), done))
    large = asyncio.create_task(read_size(bodies, Sender(length=4 * MIB).send(4 * MIB), later))
    await run_pending_tasks()
    middle = asyncio.create_task(read_size(bodies, Sender(length=2 * MIB).send(2 * MIB), later))
    await run_pending_tasks()
    done.set()
    await reader
    await run_pending_tasks()
    assert bodies.reserved_bytes == 2 * MIB, "the smaller one goes first"
    later.set()
    assert await asyncio.gather(middle, large) == [2 * MIB, 4 * MIB]
    assert bodies.reserved_bytes == 0


async def test_stalled_body_times_out_only_while_others_wait() -> None:
    bodies, done = BodyReader(4 * MIB, 4 * MIB, IMPATIENT), asyncio.Event()
    done.set()
    slow = Sender(length=4 * MIB).send(KIB, more=True)
    holding = asyncio.create_task(read_size(bodies, slow, done))
    await asyncio.sleep(0.2)
    assert not holding.done(), "nobody waits"
    assert await read_size(bodies, Sender(length=2 * MIB).send(2 * MIB), done) == 2 * MIB
    with pytest.raises(HTTPException) as raised:
        await holding
    assert raised.value.status_code == 408


async def test_unfinished_body_times_out_though_no_body_waits() -> None:
    bodies, done = BodyReader(4 * MIB, 4 * MIB, BodyTimeouts(total_seconds=0.1)), asyncio.Event()
    with pytest.raises(HTTPException) as raised:
        await read_size(bodies, Sender().send(MIB, more=True), done)
    assert raised.value.status_code == 408
    assert bodies.reserved_bytes == 0


async def test_tenant_leaves_half_of_free_budget_to_others() -> None:
    bodies, done = BodyReader(4 * MIB, 16 * MIB), asyncio.Event()
    greedy = [Sender("greedy", 4 * MIB).send(4 * MIB) for _ in range(4)]
    tasks = [asyncio.create_task(read_size(bodies, each, done)) for each in greedy]
    await run_pending_tasks()
    assert bodies.reserved_bytes == 8 * MIB, "half: it could take as much as it leaves"
    other = asyncio.create_task(read_size(bodies, Sender("other", 4 * MIB).send(4 * MIB), done))
    await run_pending_tasks()
    assert bodies.reserved_bytes == 12 * MIB
    done.set()
    await asyncio.gather(*tasks, other)
    assert bodies.reserved_bytes == 0


async def test_body_of_unknown_length_reserves_memory_as_chunks_arrive() -> None:
    bodies, done = BodyReader(4 * MIB, 4 * MIB), asyncio.Event()
    done.set()
    sender = Sender()
    reading = asyncio.create_task(read_size(bodies, sender, done))
    sender.send(UNCOUNTED_BYTES, more=True)
    await run_pending_tasks()
    assert bodies.reserved_bytes == 0
    sender.send(KIB, more=True)
    await run_pending_tasks()
    assert UNCOUNTED_BYTES < bodies.reserved_bytes < MIB
    sender.send(3 * MIB)
    assert await reading == 3 * MIB + KIB + UNCOUNTED_BYTES
    sender = Sender().send(5 * MIB)
    with pytest.raises(HTTPException) as raised:
        await read_size(bodies, sender, done)
    assert raised.value.status_code == 413
    assert bodies.reserved_bytes == 0


async def test_disconnect_releases_reserved_memory() -> None:
    bodies, done = BodyReader(4 * MIB, 4 * MIB), asyncio.Event()
    leaving = Sender(length=4 * MIB).send(KIB, more=True)
    reading = asyncio.create_task(read_size(bodies, leaving, done))
    await run_pending_tasks()
    assert bodies.reserved_bytes == 4 * MIB
    leaving.leave()
    with pytest.raises(ClientDisconnect):
        await reading
    assert bodies.reserved_bytes == 0


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"])
async def test_browser_request_without_json_content_type_is_rejected(kind: str) -> None:
    async with open_api(FakeEngine(hashed(b"ab"))) as api:
        content = b'{"prompt": "a", "max_tokens": 1}'
        for browser in ({"origin": "https://evil.example"}, {"origin": "null"}, {"sec-fetch-site": "cross-site"}):
            headers = {"content-type": kind, **browser}
            answer = await api.http.post("/v1/completions", content=content, headers=headers)
            assert answer.status_code == 400
            assert "Content-Type: application/json" in answer.json()["error"]["message"]
            for good in ("application/json", "Application/JSON; charset=utf-8", "application/vnd.api+json"):
                headers = {"content-type": good, **browser}
                assert (await api.http.post("/v1/completions", content=content, headers=headers)).is_success
        # curl -d, as in Ollama's examples
        assert (await api.http.post("/v1/completions", content=content, headers={"content-type": kind})).is_success


def test_slow_body_is_judged_by_reserved_memory() -> None:
    """A client that reserves much memory and sends little would keep other clients out."""
    began, times = time.monotonic() - 4, BodyTimeouts()
    large = BodyBuffer("", reserved_bytes=16 * MIB, received_bytes=4 * 300 * KIB, started_at=began)
    assert times.is_slow(large)
    assert not times.is_slow(BodyBuffer("", reserved_bytes=16 * MIB, received_bytes=15 * MIB, started_at=began))
    assert not times.is_slow(BodyBuffer("", reserved_bytes=100 * KIB, received_bytes=90 * KIB, started_at=began))
