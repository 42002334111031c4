"""Streams outlive their engine: it is killed at random moments, and every stream ends as it does without faults."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from tests.e2e.server import Server

STREAMS = 64
KILLS = int(os.environ.get("TEST_KILLS", "8"))
SIGNALS = (signal.SIGKILL, signal.SIGSEGV, signal.SIGSTOP)

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"prompt": "Once upon a time", "temperature": 0},
    "seeded": {"prompt": "The old woman said", "temperature": 1.0, "seed": 5},
    "two": {"prompt": "A fox and a crow", "temperature": 0.9, "seed": 6, "n": 2},
    "stop": {"prompt": "The king had three", "temperature": 0.8, "seed": 7, "stop": ["the", "ing"]},
    "logprobs": {"prompt": "In the forest", "temperature": 0.7, "seed": 8, "logprobs": 3},
    "penalties": {"prompt": "The bear", "temperature": 1.0, "seed": 9, "frequency_penalty": 0.6, "top_p": 0.9},
    "echo": {"prompt": "Little Hans", "temperature": 0, "echo": True, "logprobs": 1},
    "json": {
        "prompt": "A person:",
        "temperature": 1.0,
        "seed": 10,
        "response_format": {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}},
    },
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("server") / "log", "--engine-heartbeat-timeout", "3")
    yield server
    assert server.stop() == 0


async def answer(client: httpx.AsyncClient, kind: str) -> dict[int, list[Any]]:
    """Everything a stream says, by choice: text, finish reason, log probabilities; and the completion tokens."""
    body = {"max_tokens": 120} | KINDS[kind] | {"stream": True, "stream_options": {"include_usage": True}}
    found: dict[int, list[Any]] = {}
    async with client.stream("POST", "/v1/completions", json=body) as response:
        assert response.status_code == 200, (await response.aread()).decode()
        done = False
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                done = done or line == "data: [DONE]"
                continue
            chunk = msgspec.json.decode(line.removeprefix("data: "))
            assert "error" not in chunk, chunk
            if chunk.get("usage"):
                found[-1] = [chunk["usage"]["completion_tokens"]]
            for choice in chunk["choices"]:
                text, reason, logprobs = found.setdefault(choice["index"], ["", None, []])
                logprobs += (choice["logprobs"] or {}).get("token_logprobs", [])
                found[choice["index"]] = [text + choice["text"], choice["finish_reason"] or reason, logprobs]
        assert done
    return found


async def kill_engines(server: Server, rng: random.Random, kills: int) -> int:
    """Kill one engine after another, one in four while it starts; how many were ready."""
    killed, ready_ones = 0, 0
    for _ in range(kills):
        while (pid := server.engine_pid()) in (None, killed):  # noqa: ASYNC110, there is no event to wait for
            await asyncio.sleep(0.02)
        assert pid is not None
        if ready := rng.random() < 0.75:
            while not await asyncio.to_thread(server.healthy):  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        await asyncio.sleep(rng.uniform(0.0, 1.5))
        os.kill(pid, rng.choice(SIGNALS))
        killed, ready_ones = pid, ready_ones + ready
    return ready_ones


async def test_no_stream_notices_that_engines_die(server: Server) -> None:
    limits = httpx.Limits(max_connections=STREAMS)
    async with httpx.AsyncClient(base_url=server.url, timeout=240, limits=limits) as client:
        expected = {kind: await answer(client, kind) for kind in KINDS}
        killer = asyncio.create_task(kill_engines(server, random.Random(1), KILLS))
        answered = 0

        async def user(number: int) -> None:
            nonlocal answered
            kinds = list(KINDS)
            while True:
                kind = kinds[number % len(kinds)]
                assert await answer(client, kind) == expected[kind], kind
                answered += 1
                number += 1
                if killer.done():
                    return

        await asyncio.gather(*[user(number) for number in range(STREAMS)])
    assert answered >= STREAMS
    assert server.metric("quire:engine_deaths_total") >= killer.result() > 0
    assert server.metric("quire:quarantined_requests_total") == 0


async def test_an_engine_killed_while_the_server_drains(tmp_path: Path) -> None:
    server = Server(tmp_path / "log")
    async with httpx.AsyncClient(base_url=server.url, timeout=240) as client:
        expected = await answer(client, "seeded")
        streams = [asyncio.create_task(answer(client, "seeded")) for _ in range(4)]
        while server.metric("vllm:num_requests_running") == 0:  # noqa: ASYNC110, there is no event to wait for
            await asyncio.sleep(0.01)
        server.process.send_signal(signal.SIGTERM)
        os.kill(server.engine_pid(), signal.SIGKILL)
        assert await asyncio.gather(*streams) == [expected] * 4
    assert await asyncio.to_thread(server.process.wait, 60) == 0
