"""Server-sent events: status, pings, errors and ends, on a real server and on EventStream alone."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Any

import httpx
import pytest
from openai import APIError, AsyncOpenAI
from starlette.types import Message

from quire.engine.common.errors import EngineError, Overloaded
from quire.server.config import ServerConfig
from quire.server.encoding import PING_EVENT
from quire.server.http.sse import EventStream
from tests.server.api import NAME
from tests.server.fake import FakeEngine, hashed
from tests.server.hosted import idle, serving

LETTERS = hashed(b"abc")
SHORT = 0.02
"""Seconds of silence until a ping."""


class Stream:
    """An EventStream without a server: what it sends, and a client that can disconnect."""

    def __init__(self, ping: float = SHORT) -> None:
        self.sent: asyncio.Queue[Message] = asyncio.Queue()
        self.chunks: asyncio.Queue[bytes | Exception | None] = asyncio.Queue()
        self.left = asyncio.Event()
        self.closed = 0
        stream = EventStream(self._chunks(), self._close, {"X-A": "b"}, ServerConfig(sse_ping=ping))
        self.task = asyncio.create_task(stream({"type": "http", "method": "POST"}, self._receive, self.sent.put))

    async def _chunks(self) -> AsyncGenerator[bytes]:
        while (chunk := await self.chunks.get()) is not None:
            if isinstance(chunk, Exception):
                raise chunk
            yield chunk

    def _close(self) -> None:
        self.closed += 1

    async def _receive(self) -> Message:
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def next(self) -> Any:
        """The status, or the next part of the body."""
        message = await asyncio.wait_for(self.sent.get(), 20)
        return message.get("status", message.get("body"))


async def test_sse_status_waits_for_first_chunk_or_ping() -> None:
    quick, slow = Stream(ping=1000), Stream()
    quick.chunks.put_nowait(b"data: 1\n\n")
    assert [await quick.next() for _ in range(2)] == [200, b"data: 1\n\n"]
    assert [await slow.next() for _ in range(3)] == [200, PING_EVENT, PING_EVENT]
    slow.chunks.put_nowait(b"data: 1\n\n")
    while (part := await slow.next()) == PING_EVENT:
        pass
    assert part == b"data: 1\n\n"
    for stream in (quick, slow):
        stream.chunks.put_nowait(None)
        await stream.task
        assert stream.closed
    last = [slow.sent.get_nowait() for _ in range(slow.sent.qsize())][-1]
    assert (last["body"], last["more_body"]) == (b"", False)


async def test_zero_sse_ping_disables_pings() -> None:
    stream = Stream(ping=0)
    await asyncio.sleep(3 * SHORT)
    assert stream.sent.empty()
    stream.chunks.put_nowait(Overloaded("full"))
    with pytest.raises(Overloaded, match="full"):
        await stream.task
    assert stream.sent.empty()


async def test_error_after_ping_is_sent_as_last_event() -> None:
    stream = Stream()
    assert [await stream.next() for _ in range(2)] == [200, PING_EVENT]
    stream.chunks.put_nowait(EngineError("the engine tripped"))
    await stream.task
    *_, last = [stream.sent.get_nowait() for _ in range(stream.sent.qsize())]
    assert json.loads(last["body"].removeprefix(b"data: "))["error"]["message"] == "the engine tripped"
    assert last["more_body"] is False


async def test_disconnect_before_first_chunk_ends_stream_with_status() -> None:
    stream = Stream(ping=1000)
    stream.left.set()
    await asyncio.wait_for(stream.task, 20)
    assert stream.closed
    assert await stream.next() == 200, "as the log of requests has it"


async def test_disconnect_closes_chunk_generator() -> None:
    ended = asyncio.Event()

    async def chunks() -> AsyncGenerator[bytes]:
        try:
            yield b"data: 1\n\n"
            await asyncio.Event().wait()
        finally:
            ended.set()

    left, sent = asyncio.Event(), asyncio.Queue[Message]()

    async def receive() -> Message:
        await left.wait()
        return {"type": "http.disconnect"}

    stream = EventStream(chunks(), lambda: None, {}, ServerConfig())
    task = asyncio.create_task(stream({"type": "http", "method": "POST"}, receive, sent.put))
    await sent.get()
    left.set()
    await asyncio.wait_for(task, 20)
    assert ended.is_set()


def parse_sse_data(text: str) -> tuple[list[str], int]:
    """The data of each event, parsed as the SSE standard says, and the number of comments."""
    events, comments, data = [], 0, list[str]()
    for line in text.split("\n"):
        if line.startswith(":"):
            comments += 1
            assert not data, "a comment inside an event"
        elif line.startswith("data:"):
            data.append(line[5:].removeprefix(" "))
        else:
            assert line == ""
            if data:
                events.append("\n".join(data))
            data = []
    return events, comments


async def test_pings_between_events_leave_text_unchanged() -> None:
    body = {"model": NAME, "prompt": "x", "max_tokens": 4, "seed": 1}
    texts = []
    for step_seconds, ping in ((0.0, 15.0), (10 * SHORT, SHORT)):
        engine = FakeEngine(LETTERS, step_seconds=step_seconds)
        async with serving(engine, sse_ping=ping) as port:
            async with httpx.AsyncClient(base_url=port.url) as http:
                answer = await http.post("/v1/completions", json={**body, "stream": True})
            events, comments = parse_sse_data(answer.text)
            assert (comments > 0) == (step_seconds > 0)
            assert events.pop() == "[DONE]"
            texts.append("".join(json.loads(each)["choices"][0]["text"] for each in events))
            async with AsyncOpenAI(base_url=f"{port.url}/v1", api_key="none") as client:
                stream = await client.completions.create(**body, stream=True)
                texts.append("".join([chunk.choices[0].text async for chunk in stream]))
    assert len(set(texts)) == 1
    assert len(texts[0]) == 4


class HeldEngine(FakeEngine):
    """Takes no step until `go` is set."""

    def __init__(self, fail_at: int | None = None) -> None:
        super().__init__(LETTERS, fail_at=fail_at)
        self.go = asyncio.Event()

    async def _run(self) -> None:
        await self.go.wait()
        await super()._run()


async def test_engine_error_before_first_token_returns_500() -> None:
    engine = FakeEngine(LETTERS, fail_at=0)
    async with serving(engine, sse_ping=1000) as port, httpx.AsyncClient(base_url=port.url) as http:
        answer = await http.post("/v1/completions", json={"prompt": "x", "stream": True})
        assert (answer.status_code, answer.json()["error"]["message"]) == (500, "the engine tripped")


async def test_engine_error_after_ping_raises_api_error_in_openai_sdk() -> None:
    engine = HeldEngine(fail_at=0)
    async with (
        serving(engine, sse_ping=SHORT) as port,
        AsyncOpenAI(base_url=f"{port.url}/v1", api_key="none", max_retries=0) as client,
    ):
        stream = await client.completions.create(model=NAME, prompt="x", stream=True)  # returns with the status
        engine.go.set()
        with pytest.raises(APIError, match="the engine tripped"):
            async for _ in stream:
                pass


async def test_disconnect_after_ping_aborts_engine_request() -> None:
    engine = HeldEngine()
    async with serving(engine, sse_ping=SHORT) as port, httpx.AsyncClient(base_url=port.url) as http:
        async with http.stream("POST", "/v1/completions", json={"prompt": "x", "stream": True}) as response:
            assert response.status_code == 200
            assert len(engine.running) == 1
        await idle(engine)
        assert engine.aborted == [engine.seen[0].id]


async def test_drain_completes_open_streams_and_rejects_new_requests() -> None:
    engine = HeldEngine()
    async with serving(engine, sse_ping=SHORT) as port, httpx.AsyncClient(base_url=port.url) as http:
        body = {"prompt": "x", "stream": True, "max_tokens": 50}
        async with (
            http.stream("POST", "/v1/completions", json=body) as response,
            http.stream("GET", "/v1/engine/events") as view,
        ):
            draining = asyncio.create_task(port.server.drain_requests())
            rejection = await http.post("/v1/completions", json=body)
            assert rejection.status_code == 503
            engine.go.set()
            text = "".join([part async for part in response.aiter_text()])
            await draining
            assert "event: hello" in "".join([part async for part in view.aiter_text()])
        events, _ = parse_sse_data(text)
        assert len(events) == 51
        assert events[-1] == "[DONE]"


async def test_stream_response_has_exact_status_line_and_headers() -> None:
    content = b'{"prompt": "x", "stream": true}'
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nX-Request-Id: me\r\n"
    length = b"Content-Length: %d\r\n\r\n" % len(content)
    async with serving(FakeEngine(LETTERS)) as port:
        answer = (await port.send(head + length + content)).partition(b"\r\n\r\n")[0]
    status, *lines = answer.split(b"\r\n")
    assert status == b"HTTP/1.1 200 OK"
    assert sorted(line for line in lines if not line.startswith(b"date: ")) == [
        b"cache-control: no-cache",
        b"connection: close",
        b"content-type: text/event-stream; charset=utf-8",
        b"server: uvicorn",
        b"transfer-encoding: chunked",
        b"x-accel-buffering: no",
        b"x-request-id: me",
        b"x-weights-version: 1",
    ]
