"""The engine is killed at random moments, and every answer equals that of a run without faults."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.server import Server
from tests.e2e.streams import KINDS, answer, ask_until
from tests.engine.test_lossless import hybrid

pytestmark = pytest.mark.slow

STREAMS = 64
KILLS = int(os.environ.get("TEST_KILLS", "8"))
SIGNALS = (signal.SIGKILL, signal.SIGSEGV, signal.SIGSTOP)
FLAGS = ("--threads", "1", "--engine-heartbeat-timeout", "3", "--tool-call-parser", "hermes")


@pytest.fixture(scope="module", params=["none", "suffix"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server without speculative decoding, and one that drafts from the suffixes of earlier answers."""
    guessing = () if request.param == "none" else ("--speculative-config", request.param)
    server = Server(tmp_path_factory.mktemp("server") / "log", *FLAGS, *guessing)
    yield server
    assert server.stop() == 0


@pytest.fixture(scope="module")
async def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Answers of a server without speculative decoding, by kind."""
    server = Server(tmp_path_factory.mktemp("expected") / "log", *FLAGS)
    async with httpx.AsyncClient(base_url=server.url, timeout=240) as client:
        answers = {kind: await answer(client, asked) for kind, asked in KINDS.items()}
    assert server.stop() == 0
    return answers


async def kill_engines(server: Server, rng: random.Random, kills: int) -> int:
    """Kill one engine after another, one in four during its start; return how many were ready."""
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


async def test_answers_are_unchanged_when_engines_are_killed(server: Server, expected: dict[str, Any]) -> None:
    limits = httpx.Limits(max_connections=STREAMS)
    async with httpx.AsyncClient(base_url=server.url, timeout=240, limits=limits) as client:
        killer = asyncio.create_task(kill_engines(server, random.Random(1), KILLS))
        await ask_until(killer, client, expected, STREAMS)
    assert server.metric("quire:engine_deaths_total") >= killer.result() > 0
    assert server.metric("quire:quarantined_requests_total") == 0


async def test_recurrent_states_are_recomputed_after_engine_kills(tmp_path: Path) -> None:
    """A model with short convolutions, whose states die with the engine; rejected drafts make it restore states."""
    model = ("--model", str(hybrid(tmp_path, "lfm2")), "--max-model-len", "400", *FLAGS)
    plain = Server(tmp_path / "plain", *model, "--no-enable-prefix-caching")
    async with httpx.AsyncClient(base_url=plain.url, timeout=240) as client:
        plain_answers = {kind: await answer(client, asked) for kind, asked in KINDS.items()}
    assert plain.stop() == 0
    server = Server(tmp_path / "log", *model, "--speculative-config", "ngram")
    async with httpx.AsyncClient(base_url=server.url, timeout=240) as client:
        killer = asyncio.create_task(kill_engines(server, random.Random(2), 4))
        await ask_until(killer, client, plain_answers, 24)
    assert server.metric("quire:engine_deaths_total") >= killer.result() > 0
    assert server.metric("quire:state_bytes") > 0
    assert server.stop() == 0


async def test_answers_of_transformers_backend_survive_engine_kills(tmp_path: Path) -> None:
    server = Server(tmp_path / "log", *FLAGS, "--model-impl", "transformers")
    async with httpx.AsyncClient(base_url=server.url, timeout=240) as client:
        expected = {kind: await answer(client, asked) for kind, asked in KINDS.items()}
        killer = asyncio.create_task(kill_engines(server, random.Random(2), 3))
        await ask_until(killer, client, expected, 8)
    assert server.metric("quire:engine_deaths_total") >= killer.result() > 0
    assert server.stop() == 0
    assert "transformers' LlamaForCausalLM computes it" in (tmp_path / "log").read_text()


async def test_server_survives_engine_kills_during_startup_and_drain(tmp_path: Path) -> None:
    """Before the first engine is ready, it is killed as often as would end the start if the engine failed by itself.
    Then it is killed while requests of all kinds drain.
    """
    log = tmp_path / "log"
    server = Server(log, *FLAGS, wait=False)
    killed: set[int] = set()
    for number in (signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM, signal.SIGKILL, signal.SIGSTOP, signal.SIGKILL):
        while (pid := server.engine_pid()) is None or pid in killed:  # noqa: ASYNC110, there is no event to wait for
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.1 * len(killed))
        os.kill(pid, number)
        killed.add(pid)
    await asyncio.to_thread(server.wait)
    async with httpx.AsyncClient(base_url=server.url, timeout=240) as client:
        expected = {kind: await answer(client, asked) for kind, asked in KINDS.items()}
        streams = [asyncio.create_task(answer(client, asked)) for asked in KINDS.values()]
        while server.metric("vllm:num_requests_running") == 0:  # noqa: ASYNC110
            await asyncio.sleep(0.1)  # until all requests are sent: those after the signal are rejected
        server.process.send_signal(signal.SIGTERM)
        os.kill(server.engine_pid(), signal.SIGKILL)
        assert await asyncio.gather(*streams) == list(expected.values())
    assert await asyncio.to_thread(server.process.wait, 60) == 0
    assert log.read_text().count("; starting another") == len(killed)
