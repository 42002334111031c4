"""Explanations of a real engine: phases add up, chunks and batch mates are right, and engine restarts are included."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.e2e.server import Server

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("server") / "log"
    server = Server(
        log, "--max-num-batched-tokens", "64", "--num-kv-blocks", "40", "--max-model-len", "512", "--threads", "1"
    )
    yield server
    assert server.stop() == 0


async def complete(client: httpx.AsyncClient, **body: Any) -> tuple[str, float]:
    """Return the answer's id and the seconds that it took."""
    began = time.monotonic()
    response = await client.post("/v1/completions", json={"temperature": 0, "ignore_eos": True} | body)
    assert response.status_code == 200, response.text
    return response.json()["id"], time.monotonic() - began


async def explain(client: httpx.AsyncClient, name: str) -> Any:
    response = await client.get(f"/v1/requests/{name}/explain")
    assert response.status_code == 200, response.text
    return response.json()


def check_sums(found: Any) -> None:
    assert sum(found["phases_ms"].values()) == pytest.approx(found["wall_ms"], abs=0.1)


async def test_explain_reports_phases_chunks_and_cached_tokens_of_one_request(server: Server) -> None:
    async with httpx.AsyncClient(base_url=server.url, timeout=120) as client:
        name, seconds = await complete(client, prompt=list(range(10, 210)), max_tokens=50)
        explanation = await explain(client, name)
        check_sums(explanation)
        assert explanation["wall_ms"] <= seconds * 1000
        (sequence,) = explanation["sequences"]
        assert [(each["first_token"], each["tokens"]) for each in sequence["chunks"]] == [
            (0, 64),
            (64, 64),
            (128, 64),
            (192, 8),
        ]
        assert (sequence["prompt_tokens"], sequence["cached_tokens"], sequence["output_tokens"]) == (200, 0, 50)
        assert [(each["steps"], each["mates"]) for each in sequence["batches"]] == [(53, [])]
        assert sequence["first_token_ms"] < explanation["wall_ms"]
        latest = (await client.get("/v1/engine/requests", params={"limit": 1})).json()["data"]
        assert [(each["id"], each["prompt_tokens"], each["output_tokens"]) for each in latest] == [(name, 200, 50)]
        assert latest[0]["phases_ms"] == explanation["phases_ms"]
        repeated, _ = await complete(client, prompt=list(range(10, 210)), max_tokens=2)
        (sequence,) = (await explain(client, repeated))["sequences"]
        assert sequence["cached_tokens"] == 192
        assert [(each["first_token"], each["tokens"]) for each in sequence["chunks"]] == [(192, 8)]


async def test_explain_reports_batch_mates_and_preemptions(server: Server) -> None:
    """40 blocks hold 640 tokens and 5 requests need 150 output tokens each, so some wait and some are preempted."""
    async with httpx.AsyncClient(base_url=server.url, timeout=240) as client:
        done = await asyncio.gather(
            *(complete(client, prompt=list(range(20 + i, 60 + i)), max_tokens=150) for i in range(5))
        )
        names = [name for name, _ in done]
        explanations = [await explain(client, name) for name in names]
    accompanied = 0
    for explanation in explanations:
        check_sums(explanation)
        (sequence,) = explanation["sequences"]
        assert sequence["output_tokens"] == 150
        mates = {mate.rsplit("-", 1)[0] for batch in sequence["batches"] for mate in batch["mates"]}
        assert mates <= set(names) - {explanation["id"]}
        accompanied += bool(mates)
    assert accompanied > 1  # the last one may have waited until all others had ended
    sequences = [explanation["sequences"][0] for explanation in explanations]
    assert server.metric("vllm:num_preemptions_total") == sum(sequence["preemptions"] for sequence in sequences) > 0
    for sequence in sequences:
        assert ("preempted" in sequence["phases_ms"]) == (sequence["preemptions"] > 0)


async def test_explain_reports_replay_and_recovering_phase_after_engine_kill(server: Server) -> None:
    """The pool has room for little more than one sequence, so four take long enough to be killed meanwhile."""
    async with httpx.AsyncClient(base_url=server.url, timeout=240) as client:
        asking = asyncio.create_task(complete(client, prompt="Once", max_tokens=450, n=4))
        while server.metric("vllm:num_requests_running") == 0:
            assert not asking.done()
            await asyncio.sleep(0.01)
        os.kill(server.engine_pid(), signal.SIGKILL)
        name, _ = await asking
        explanation = await explain(client, name)
    check_sums(explanation)
    assert [sequence["output_tokens"] for sequence in explanation["sequences"]] == [450] * 4
    assert max(sequence["replays"] for sequence in explanation["sequences"]) == 1
    assert explanation["phases_ms"]["recovering"] > 0
    assert {each["engine"] for sequence in explanation["sequences"] for each in sequence["batches"]} >= {1}
