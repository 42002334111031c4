"""At ten times its capacity a server rejects excess requests at once and completes those that it accepted.

`TEST_OVERLOAD_SECONDS=60` makes the test a minute long; `-s` shows figures such as the time of a rejection.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from tests.e2e.server import Server

pytestmark = pytest.mark.slow

SECONDS = float(os.environ.get("TEST_OVERLOAD_SECONDS", "4"))
OVERLOAD = 10
MAX_GROWTH = 16 * 2**20
"""Bytes. A minute has half a million requests, so memory kept for rejected ones would show."""
TOKENS = 200
SLOTS, QUEUE = 16, 64
FLAGS = (
    *("--max-num-seqs", str(SLOTS), "--max-queued-requests", str(QUEUE), "--max-model-len", "1024", "--threads", "1"),
    # Bounded memory is set so small that it is full before measurement starts.
    *("--request-history", "16", "--num-kv-blocks", "256"),
)


@pytest.fixture
def server(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Server]:
    server = Server(tmp_path / "log", *FLAGS, *getattr(request, "param", ()))
    yield server
    assert server.stop() == 0


@dataclass(frozen=True)
class Answer:
    status: int
    retry_after: bool
    tokens: int
    """Completion tokens in the answer's usage."""
    seconds: float
    at: float


@asynccontextmanager
async def client_of(server: Server, key: str = "x") -> AsyncIterator[httpx.AsyncClient]:
    """A client that opens a connection for each request, without a limit."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    headers = {"Authorization": f"Bearer {key}"}
    async with httpx.AsyncClient(base_url=server.url, headers=headers, limits=limits, timeout=None) as client:
        yield client


async def ask(client: httpx.AsyncClient, *, tokens: int = TOKENS, number: int = 0) -> Answer:
    body = {"prompt": f"{number}: Once upon a time", "max_tokens": tokens, "ignore_eos": True, "temperature": 0}
    began = time.perf_counter()
    response = await client.post("/v1/completions", json=body)
    at = time.perf_counter()
    usage = response.json().get("usage") or {}
    retry_after = "Retry-After" in response.headers
    return Answer(response.status_code, retry_after, usage.get("completion_tokens", 0), at - began, at)


async def measure_capacity(client: httpx.AsyncClient) -> float:
    """Requests per second that the server completes with every slot busy."""
    began = time.perf_counter()
    answers = await asyncio.gather(*[ask(client, number=number) for number in range(32)])
    assert [answer.tokens for answer in answers] == [TOKENS] * 32
    return len(answers) / (time.perf_counter() - began)


async def flood(client: httpx.AsyncClient, rate: float, seconds: float) -> list[Answer]:
    """Send `rate` requests per second, whatever their answers are."""
    began = time.perf_counter()
    calls: list[asyncio.Task[Answer]] = []
    while (now := time.perf_counter() - began) < seconds:
        missing = int(now * rate) + 1 - len(calls)
        calls += [asyncio.create_task(ask(client, number=len(calls) + i)) for i in range(missing)]
        await asyncio.sleep(0.005)
    return list(await asyncio.gather(*calls))


def resident_bytes(server: Server) -> dict[str, int]:
    """Resident bytes of the server process and of the engine process."""
    pids = {"server": server.process.pid, "engine": server.engine_pid()}
    return {name: int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096 for name, pid in pids.items()}


needs_proc = pytest.mark.skipif(not Path("/proc").is_dir(), reason="reads /proc")


@needs_proc
@pytest.mark.timeout(600)
async def test_overloaded_server_rejects_excess_and_keeps_memory_bounded(server: Server) -> None:
    async with client_of(server) as client:
        rate = OVERLOAD * await measure_capacity(client)
        fills = 3 * (SLOTS + QUEUE) / rate  # seconds; the longest time of this test on a slow machine
        # As long as the measured flood: on a slow machine connections wait for their rejections and take memory.
        await flood(client, rate, max(SECONDS, fills))
        for _ in range(4):  # a longer queue of connections may take more memory once; a leak grows each time
            before = resident_bytes(server)
            answers = await flood(client, rate, max(SECONDS, fills))
            after = resident_bytes(server)
            if all(after[name] - before[name] < MAX_GROWTH for name in after):
                break
        assert (await ask(client)).tokens == TOKENS
    completed = [answer for answer in answers if answer.status == 200]
    rejections = [answer for answer in answers if answer.status != 200]
    median = statistics.median(answer.seconds for answer in rejections)
    growth = {name: (after[name] - before[name]) / 2**20 for name in after}
    print(
        f"\n{SECONDS:g} s at {rate:.0f} requests/s: {len(completed)} answered, {len(rejections)} refused, after "
        f"{1000 * median:.1f} ms (median) and {1000 * max(answer.seconds for answer in rejections):.0f} ms (longest); "
        + ", ".join(f"{name} {before[name] / 2**20:.0f} MiB {value:+.1f}" for name, value in growth.items())
    )
    assert {answer.status for answer in rejections} == {503}
    assert all(answer.retry_after for answer in rejections)
    assert [answer.tokens for answer in completed] == [TOKENS] * len(completed)
    assert len(rejections) > len(completed) > 0
    assert max(growth.values()) * 2**20 < MAX_GROWTH
    assert server.metric("vllm:num_requests_waiting") == server.metric("vllm:num_requests_running") == 0


@pytest.mark.parametrize("server", [("--api-key", "greedy", "modest", "--max-queued-requests", "200")], indirect=True)
@pytest.mark.timeout(600)
async def test_greedy_api_key_does_not_take_share_of_other_key(server: Server) -> None:
    """One key has ten times as many requests open or rejected as there are slots, the other three times as many. With
    so many, the time until a busy client sends its next request leaves no slot empty.
    """
    answers: dict[str, list[Answer]] = {"greedy": [], "modest": []}
    over = asyncio.Event()

    async def user(client: httpx.AsyncClient, key: str, number: int) -> None:
        while not over.is_set():
            answers[key].append(await ask(client, tokens=80 + number % 40, number=number))
            if answers[key][-1].status != 200:
                await asyncio.sleep(3)

    def done() -> int:
        return sum(each.status == 200 for found in answers.values() for each in found)

    async with client_of(server, "greedy") as greedy, client_of(server, "modest") as modest:
        users = [asyncio.create_task(user(greedy, "greedy", number)) for number in range(160)]
        await asyncio.sleep(1)  # by now it has all slots and its part of the queue
        users += [asyncio.create_task(user(modest, "modest", number)) for number in range(48)]
        while len(answers["modest"]) < 48:  # noqa: ASYNC110, there is no event to wait for
            await asyncio.sleep(0.1)
        first, before = time.perf_counter(), done()
        await asyncio.sleep(2 * SECONDS)
        while done() < before + 100:  # noqa: ASYNC110, as long as a slow machine needs
            await asyncio.sleep(0.1)
        last = time.perf_counter()
        over.set()
        await asyncio.gather(*users)
    served = {key: sum(each.tokens for each in found if first < each.at <= last) for key, found in answers.items()}
    share = served["modest"] / sum(served.values())
    print(f"\n{last - first:.0f} s: tokens {served}, the modest key's part is {share:.1%}")
    assert share >= 0.85 / 2
    assert {answer.status for answer in answers["modest"]} == {200}
    assert {answer.status for answer in answers["greedy"]} == {200, 503}
