"""After short requests of every endpoint, many of them aborted, all memory, threads and files are free again.

TEST_SOAK=300000 takes an hour and makes the slopes meaningful.
"""

from __future__ import annotations

import asyncio
import os
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.server import Server, children
from tests.e2e.streams import COMPLETIONS, KINDS

CONVERSATIONS, RESPONSES = "/v1/conversations", "/v1/responses"

pytestmark = pytest.mark.slow

REQUESTS = int(os.environ.get("TEST_SOAK", "300"))
USERS = 24
LOOKS = 20
WORDS = [
    *("the", "king", "had", "a", "fox", "and", "old", "woman", "in", "forest", "who", "said", "three", "bears"),
    *("went", "home", "with", "gold", "under", "tree"),
]
LOOKED_AT = (
    *("/v1/models", "/metrics", "/health", "/live", "/version", "/tokenizer_info", "/v1/engine/requests?limit=5"),
    *("/v1/requests/nobody/explain", "/v1/responses/resp_none", "/nowhere", "/", "/openapi.json"),
)


@dataclass(frozen=True)
class Footprint:
    rss: int
    """Bytes."""
    threads: int
    files: int

    @classmethod
    def of(cls, pid: int) -> Footprint:
        status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
        kib, threads = int(status["VmRSS"].split()[0]), int(status["Threads"])
        return cls(kib * 1024, threads, len(os.listdir(f"/proc/{pid}/fd")))


def forker(server: Server) -> int:
    """The process that forks the body workers. Workers are replaced, and a limit bounds their memory."""
    (pid,) = children(server.process.pid, b"quire.server.workers")
    return pid


def slope(points: list[tuple[int, int]]) -> float:
    """Slope of the least-squares line."""
    mean_x, mean_y = (sum(column) / len(points) for column in zip(*points, strict=True))
    return sum((x - mean_x) * (y - mean_y) for x, y in points) / sum((x - mean_x) ** 2 for x, _ in points)


def words(rng: random.Random, most: int = 40) -> str:
    return " ".join(rng.choices(WORDS, k=rng.randint(1, most)))


def body(rng: random.Random) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "prompt": words(rng),
        **{"max_tokens": rng.randint(1, 12), "seed": rng.randrange(99), "n": rng.choice((1, 1, 1, 2))},
    }
    kind = rng.random()
    if kind < 0.05:
        fields["logprobs"] = 3
    elif kind < 0.1:
        fields["response_format"] = KINDS["json"]["response_format"]
    elif kind < 0.11:
        fields["structured_outputs"] = {"regex": f"[ab]{{{rng.randint(1, 500)}}}"}
    elif kind < 0.13:
        fields["temperature"] = -1
    return fields


def other_bodies(rng: random.Random) -> dict[str, dict[str, Any]]:
    """A body for each of the other endpoints that answer at once."""
    messages = [{"role": "user", "content": words(rng)} for _ in range(rng.choice((1, 1, 3)))]
    tools = {"tools": KINDS["tools"]["tools"], "tool_choice": "required"} if rng.random() < 0.2 else {}
    few = {"max_tokens": rng.randint(1, 12)}
    streamed = {"stream": rng.random() < 0.5}
    texts = [words(rng) for _ in range(rng.randint(1, 20))]
    question = {"type": "predicate", "instructions": words(rng, 5)}
    return {
        "/v1/chat/completions": {"messages": messages, **few, **tools, **streamed},
        "/v1/messages": {"messages": messages, **few, **streamed},
        "/v1/messages/count_tokens": {"messages": messages},
        "/v1/responses": {"input": words(rng), "max_output_tokens": 16, "store": rng.random() < 0.5, **streamed},
        "/v1/decisions": {"input": words(rng), "questions": [question]},
        "/v1/embeddings": {"input": texts},
        "/pooling": {"input": texts},
        "/v1/score": {"text_1": words(rng), "text_2": texts},
        "/v1/rerank": {"query": words(rng), "documents": texts},
        "/tokenize": {"prompt": words(rng) * rng.choice((1, 1, 1, 1, 5000))},
        "/detokenize": {"tokens": [rng.randrange(2000) for _ in range(9)]},
    }


async def use_conversation(client: httpx.AsyncClient, rng: random.Random) -> None:
    """Use a conversation with a background response; sometimes delete all that is stored."""
    path = f"{CONVERSATIONS}/{(await client.post(CONVERSATIONS, json={})).json()['id']}"
    item = {"role": "user", "content": words(rng)}
    assert (await client.post(f"{path}/items", json={"items": [item] * 3})).is_success
    asked = {"input": words(rng), "max_output_tokens": 16, "conversation": path.rpartition("/")[2]}
    assert (await client.post(RESPONSES, json=asked)).is_success
    answer = await client.post(RESPONSES, json=asked | {"background": True})
    own = f"{RESPONSES}/{answer.json()['id']}"
    for look in (own, f"{own}/input_items", path, f"{path}/items?limit=2"):
        assert (await client.get(look)).is_success, look
    if rng.random() < 0.5:
        await client.post(f"{own}/cancel")
        await client.delete(own)
        assert (await client.delete(path)).is_success


async def ask(client: httpx.AsyncClient, rng: random.Random) -> None:
    """Send a request as users do: read to its end, left midway, or abandoned before the first byte."""
    kind = rng.random()
    if kind < 0.35:
        path, other = rng.choice(list(other_bodies(rng).items()))
        answer = await client.post(path, json=other)
        assert answer.status_code == 200, (path, answer.text)
        return
    if kind < 0.4:
        return await use_conversation(client, rng)
    if kind < 0.5:
        assert (await client.get(rng.choice(LOOKED_AT))).status_code in (200, 404)
        return
    asked, manner = body(rng), rng.random()
    if manner < 0.4:
        response = await client.post(COMPLETIONS, json=asked)
        assert response.status_code == (400 if asked.get("temperature") == -1 else 200), response.text
    elif manner < 0.5:
        try:
            async with asyncio.timeout(rng.uniform(0, 0.05)):
                await client.post(COMPLETIONS, json=asked | {"max_tokens": 400})
        except TimeoutError:
            pass
    else:
        lines = rng.choice((0, 1, 3, 10**9))
        long = {"max_tokens": 400} if lines < 10 else {}
        async with client.stream("POST", COMPLETIONS, json=asked | long | {"stream": True}) as response:
            async for _ in response.aiter_lines():
                lines -= 1
                if lines < 0:
                    break


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    """So few KV blocks that all are soon in use: untouched blocks take no memory and would look like a leak later."""
    flags = ["--threads=1", "--num-kv-blocks=128", "--max-model-len=512", "--max-stored-size=2", "--pooling-type=last"]
    server = Server(tmp_path / "log", *flags, "--data-dir", str(tmp_path / "data"))
    yield server
    assert server.stop() == 0


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.timeout(6000)
async def test_finished_requests_leak_no_memory_threads_or_files(server: Server) -> None:
    pids = {"API": server.process.pid, "engine": server.engine_pid(), "workers": forker(server)}
    footprints: dict[str, list[tuple[int, Footprint]]] = {name: [] for name in pids}
    limits = httpx.Limits(max_connections=USERS, max_keepalive_connections=USERS // 2)
    for part in range(LOOKS):
        rngs = [random.Random(f"{part} {number}") for number in range(REQUESTS // LOOKS)]
        users = asyncio.Semaphore(USERS)
        # A client per measurement: httpx's pool never frees the slot of a call that is cancelled while it connects.
        async with httpx.AsyncClient(base_url=server.url, timeout=120, limits=limits) as client:

            async def one(
                rng: random.Random, users: asyncio.Semaphore = users, client: httpx.AsyncClient = client
            ) -> None:
                async with users:
                    await ask(client, rng)

            await asyncio.gather(*map(one, rngs))
            for name, pid in pids.items():
                footprints[name].append(((part + 1) * len(rngs), Footprint.of(pid)))
    async with asyncio.timeout(60):
        while server.metric("vllm:num_requests_running") or server.metric("vllm:kv_cache_usage_perc"):  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    assert server.metric("vllm:num_requests_waiting") == 0
    assert server.metric("quire:engine_deaths_total") == 0
    for name, looks in footprints.items():
        warm = looks[LOOKS // 2 :]
        per_request = slope([(count, look.rss) for count, look in warm])
        print(f"{name}: {warm[-1][1].rss / 2**20:.1f} MiB, {per_request:.0f} bytes per request more", end="; ")
        print([(round(look.rss / 2**20, 1), look.threads, look.files) for _, look in looks])
        # Pools of a few threads grow until they are full; a leak would be a thread for each of hundreds of requests.
        assert max(look.threads for _, look in warm) <= looks[LOOKS // 2 - 1][1].threads + 8
        assert abs(warm[-1][1].files - warm[0][1].files) <= USERS, "open connections come and go, nothing else"
        grown = warm[-1][1].rss - warm[0][1].rss
        assert grown < 8 * 2**20, f"{name} grew by {grown} bytes while {warm[-1][0] - warm[0][0]} requests went by"
