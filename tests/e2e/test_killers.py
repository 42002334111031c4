"""A request that kills every engine that computes it ends with an error, and no other request does."""

from __future__ import annotations

import asyncio
import os
import re
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from openai import AsyncOpenAI, InternalServerError

from tests.e2e.killer.sitecustomize import SEEDS
from tests.e2e.server import Server
from tests.e2e.streams import COMPLETIONS, KINDS, answer

pytestmark = pytest.mark.slow

PATHS = (str(Path(__file__).with_name("killer")), os.environ.get("PYTHONPATH", ""))
ENV = {"PYTHONPATH": os.pathsep.join(path for path in PATHS if path)}
FLAGS = ("--threads=1", "--engine-heartbeat-timeout=3", "--engine-step-timeout=5", "--tool-call-parser=hermes")
MESSAGE = "this request crashed the engine each time it ran by itself, so it was given up"


def killer(way: str, tokens: int = 0) -> dict[str, Any]:
    """A request that ends the engine in the step after it has `tokens` tokens."""
    return {"prompt": "The wolf", "temperature": 1.0, "seed": SEEDS[way], "min_tokens": tokens, "max_tokens": 60}


async def post_among_others(
    server: Server, client: httpx.AsyncClient, others: int, *bodies: dict[str, Any]
) -> list[Any]:
    """Post `bodies` while other requests run; the answers to these must equal those without disturbance."""
    kinds = [list(KINDS)[number % len(KINDS)] for number in range(others)]
    expected = {kind: await answer(client, KINDS[kind]) for kind in dict.fromkeys(kinds)}
    running = [asyncio.create_task(answer(client, KINDS[kind])) for kind in kinds]
    while server.metric("vllm:num_requests_running") == 0:  # noqa: ASYNC110, there is no event to wait for
        await asyncio.sleep(0.01)
    responses = await asyncio.gather(*[client.post(COMPLETIONS, json=body) for body in bodies])
    assert await asyncio.gather(*running) == [expected[kind] for kind in kinds]
    return responses


def client_of(server: Server) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=server.url, timeout=280, limits=httpx.Limits(max_connections=80))


@pytest.mark.parametrize("replicas", [1, 2])
async def test_request_that_segfaults_engine_is_quarantined_among_64(replicas: int, tmp_path: Path) -> None:
    server = Server(tmp_path / "log", *FLAGS, f"--data-parallel-size={replicas}", env=ENV)
    async with client_of(server) as client:
        (response,) = await post_among_others(server, client, 63, killer("segfault", tokens=3))
    assert response.status_code == 500, response.text
    assert response.headers.get("x-should-retry") == "false", response.text
    error = {"message": MESSAGE, "type": "server_error", "param": None, "code": "request_quarantined"}
    assert response.json() == {"error": error}
    deaths = int(server.metric("quire:engine_deaths_total"))
    assert 3 <= deaths <= 10, "found by halves, not one by one"
    assert server.metric("quire:request_replays_total") >= deaths - 1
    assert server.metric("quire:quarantined_requests_total") == 1
    assert server.stop() == 0
    log = server.log.read_text()
    assert len(re.findall(r"the engine was killed by SIGSEGV; \d+ open requests continue on a new one", log)) == deaths
    assert len(re.findall(rf"request cmpl-\S+: {MESSAGE}", log)) == 1
    assert "Traceback" not in log


@pytest.mark.parametrize(
    ("way", "how"),
    [
        ("exception", "exited with code 1"),
        ("hang", r"hung in a step for \d+ s"),
        ("silence", r"sent no heartbeat for \d+ s"),
    ],
)
async def test_request_that_raises_or_hangs_engine_is_quarantined(tmp_path: Path, way: str, how: str) -> None:
    server = Server(tmp_path / "log", *FLAGS, env=ENV)
    async with client_of(server) as client:
        (response,) = await post_among_others(server, client, 5, killer(way))
    assert response.json()["error"]["code"] == "request_quarantined"
    deaths = server.metric("quire:engine_deaths_total")
    assert server.metric("quire:quarantined_requests_total") == 1
    assert server.stop() == 0
    log = server.log.read_text()
    assert len(re.findall(f"the engine {how}", log)) == deaths
    if way == "exception":
        assert "RuntimeError: a bug in the engine" in log, "its last words"


async def test_quarantine_error_reaches_stream_and_openai_sdk(tmp_path: Path) -> None:
    """The stream keeps the chunks before the error, the SDK does not retry, and all choices of the request fail
    together.
    """
    server = Server(tmp_path / "log", *FLAGS, env=ENV)
    async with client_of(server) as client, AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as openai:
        by_sdk = asyncio.create_task(
            openai.completions.create(model="quire-demo", prompt="x", seed=SEEDS["abort"], n=2, timeout=280)
        )
        async with client.stream("POST", COMPLETIONS, json=killer("exit", tokens=5) | {"stream": True}) as response:
            assert response.status_code == 200
            lines = [line async for line in response.aiter_lines() if line]
        chunks = [msgspec.json.decode(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
        assert 2 <= len(chunks) <= 6, "what left the engine of its five tokens before it was gone, and an error"
        assert chunks[-1]["error"]["code"] == "request_quarantined"
        with pytest.raises(InternalServerError, match=MESSAGE):
            await by_sdk
        assert await answer(client, KINDS["seeded"])
    assert server.metric("quire:quarantined_requests_total") == 2
    assert server.metric("vllm:num_requests_running") == 0
    assert server.stop() == 0
