"""A client that disconnects frees the engine at once: on Quire's HTTP server and real sockets, with the OpenAI SDK."""

from __future__ import annotations

import asyncio
import json
import socket
import struct

import httpx
import pytest
from openai import AsyncOpenAI

from tests.server.api import NAME
from tests.server.fake import FakeEngine, hashed
from tests.server.hosted import idle, serving

LETTERS = hashed(b"abc")


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_closed_stream_aborts_all_choices(path: str) -> None:
    engine = FakeEngine(LETTERS, max_model_len=100_000, step_seconds=0.002)
    body = {"prompt": "x", "messages": [{"role": "user", "content": "x"}], "n": 2, "max_tokens": 90_000, "stream": True}
    async with serving(engine) as port, httpx.AsyncClient(base_url=port.url) as http:
        async with http.stream("POST", path, json=body) as response:
            async for _ in response.aiter_lines():
                break
            assert len(engine.running) == 2
        await idle(engine)
        assert sorted(engine.aborted) == sorted(request.id for request in engine.seen)
        metrics = (await http.get("/metrics")).text
        assert f'vllm:request_success_total{{engine="0",finished_reason="abort",model_name="{NAME}"}} 2.0' in metrics


@pytest.mark.parametrize("stream", [True, False])
async def test_cancelled_call_without_output_aborts_request(stream: bool) -> None:
    engine = FakeEngine(LETTERS, max_model_len=100_000, step_seconds=30 if stream else 0.002)
    if stream:
        engine.pick = lambda request, position: 0xC3  # half a character: there is nothing to show
    async with serving(engine) as port, httpx.AsyncClient(base_url=port.url) as http:
        body = {"prompt": "x", "max_tokens": 90_000, "stream": stream}
        call = asyncio.create_task(http.post("/v1/completions", json=body))
        await engine.sent.wait()
        call.cancel()
        await idle(engine)
        assert engine.aborted == [engine.seen[0].id]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/engine/events"])
async def test_reset_connection_leaves_no_task_or_request(path: str) -> None:
    """The client's kernel resets the connection: no task, no request and no reader of the live view stays."""
    engine = FakeEngine(LETTERS, max_model_len=100_000, step_seconds=0.002)
    async with serving(engine) as port, httpx.AsyncClient(base_url=port.url) as http:
        assert (await http.post("/v1/completions", json={"prompt": "x", "stream": True})).status_code == 200
        await idle(engine)
        before = len(asyncio.all_tasks())
        body = json.dumps({"prompt": "x", "max_tokens": 90_000, "stream": True}).encode()
        with socket.socket() as client:
            client.setblocking(False)
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            loop = asyncio.get_running_loop()
            await loop.sock_connect(client, ("127.0.0.1", port.number))
            method = b"GET" if path == "/v1/engine/events" else b"POST"
            head = b"%s %s HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % (
                method,
                path.encode(),
                len(body),
            )
            await loop.sock_sendall(client, head + body)
            while b"data: " not in await loop.sock_recv(client, 65536):
                pass
            assert len(asyncio.all_tasks()) > before
        async with asyncio.timeout(20):
            while len(asyncio.all_tasks()) > before:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        await idle(engine)


async def test_concurrent_sdk_streams_equal_whole_responses() -> None:
    engine = FakeEngine(LETTERS, max_model_len=100_000)
    async with serving(engine) as port, AsyncOpenAI(base_url=f"{port.url}/v1", api_key="none") as client:

        async def check_stream(number: int) -> None:
            request = {"model": NAME, "messages": [{"role": "user", "content": str(number)}], "max_tokens": 50}
            stream = await client.chat.completions.create(**request, seed=1, stream=True)
            texts = []
            async for chunk in stream:
                texts.append(chunk.choices[0].delta.content or "")
                if number % 2 and len(texts) == 10:
                    await stream.close()
                    return
            whole = await client.chat.completions.create(**request, seed=1)
            assert "".join(texts) == whole.choices[0].message.content

        await asyncio.gather(*map(check_stream, range(40)))
        await idle(engine)


async def test_disconnect_cancels_grammar_check(monkeypatch: pytest.MonkeyPatch) -> None:
    began, given_up = asyncio.Event(), asyncio.Event()

    async def check(*args: object) -> None:
        began.set()
        try:
            await asyncio.Event().wait()
        finally:
            given_up.set()

    async with serving(FakeEngine(LETTERS)) as port, httpx.AsyncClient(base_url=port.url) as http:
        monkeypatch.setattr(port.server._models.loaded_runtimes[0].grammar_checker, "check_grammars", check)
        call = asyncio.create_task(http.post("/v1/completions", json={"prompt": "x", "guided_regex": "a"}))
        await began.wait()
        call.cancel()
        async with asyncio.timeout(30):
            await given_up.wait()
