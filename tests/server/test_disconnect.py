"""A client that goes away frees the engine at once; on a real socket, with the OpenAI SDK."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import pytest
import uvicorn
from openai import AsyncOpenAI

from tests.server.api import NAME, make_app
from tests.server.fake import FakeEngine, hashed


@asynccontextmanager
async def serve(engine: FakeEngine) -> AsyncIterator[str]:
    """The server's URL, on a free port of this machine."""
    config = uvicorn.Config(make_app(engine), log_level="warning", http="httptools", loop="asyncio")
    server = uvicorn.Server(config)
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    task = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        while not server.started:  # noqa: ASYNC110 - uvicorn has no event for it
            await asyncio.sleep(0.01)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        await task


async def idle(engine: FakeEngine) -> None:
    async with asyncio.timeout(5):
        while engine.running or engine.num_open:  # noqa: ASYNC110
            await asyncio.sleep(0.005)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_a_stream_that_is_left(path: str) -> None:
    engine = FakeEngine(hashed(b"abc"), max_model_len=100_000, step_seconds=0.002)
    body = {"prompt": "x", "messages": [{"role": "user", "content": "x"}], "n": 2, "max_tokens": 90_000, "stream": True}
    async with serve(engine) as url, httpx.AsyncClient(base_url=url) as http:
        async with http.stream("POST", path, json=body) as response:
            async for _ in response.aiter_lines():
                break
            assert len(engine.running) == 2
        await idle(engine)
        assert sorted(engine.aborted) == sorted(request.id for request in engine.seen)
        metrics = (await http.get("/metrics")).text
        assert f'vllm:request_success_total{{finished_reason="abort",model_name="{NAME}"}} 2.0' in metrics


@pytest.mark.parametrize("stream", [True, False])
async def test_a_call_that_is_given_up_before_anything_came(stream: bool) -> None:
    engine = FakeEngine(hashed(b"abc"), max_model_len=100_000, step_seconds=30 if stream else 0.002)
    if stream:
        engine.pick = lambda request, position: 0xC3  # half a character: there is nothing to show
    async with serve(engine) as url, httpx.AsyncClient(base_url=url) as http:
        body = {"prompt": "x", "max_tokens": 90_000, "stream": stream}
        call = asyncio.create_task(http.post("/v1/completions", json=body))
        await engine.sent.wait()
        call.cancel()
        await idle(engine)


async def test_many_streams_of_the_openai_sdk_at_once() -> None:
    engine = FakeEngine(hashed(b"abc"), max_model_len=100_000)
    async with serve(engine) as url, AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as client:

        async def one(number: int) -> None:
            asked = {"model": NAME, "messages": [{"role": "user", "content": str(number)}], "max_tokens": 50}
            stream = await client.chat.completions.create(**asked, seed=1, stream=True)
            texts = []
            async for chunk in stream:
                texts.append(chunk.choices[0].delta.content or "")
                if number % 2 and len(texts) == 10:
                    await stream.close()
                    return
            whole = await client.chat.completions.create(**asked, seed=1)
            assert "".join(texts) == whole.choices[0].message.content

        await asyncio.gather(*map(one, range(40)))
        await idle(engine)
