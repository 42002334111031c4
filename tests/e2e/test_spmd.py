"""Servers whose ranks meet at a store, as on GPUs, here on a CPU over sockets: a rank's death is survived like an
engine's, and no rank outlives its server.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from quire.engine.common.config import DEMO_MODEL, EngineConfig
from quire.engine.common.errors import EngineError
from quire.engine.engine_core import EngineCore, free_engine_memory
from quire.engine.worker.ranks.spmd import SpmdRunner
from tests.e2e.server import Server
from tests.e2e.streams import KINDS, answer, ask_until
from tests.e2e.test_ranks import marked, ranks_of, wait_until
from tests.engine.harness import request, run

pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")]
STREAMS = 8
KILLS = int(os.environ.get("TEST_KILLS", "3"))


def test_in_process_engine_error_names_killed_rank() -> None:
    settings = {"max_model_len": 256, "num_kv_blocks": 64, "threads": 2, "attention_backend": "reference"}
    engine = EngineCore(EngineConfig(model=DEMO_MODEL, tensor_parallel_size=2, **settings))
    assert len(run(engine, [request("a", [435, 1029], max_tokens=8)])["a"].ids) == 8
    assert isinstance(engine.executor, SpmdRunner)
    (pid,) = engine.executor._ranks.pids
    engine.add_request(request("b", [435, 1029]))
    engine.step()
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(EngineError, match=f"rank 1 of 2 .process {pid}. was killed by SIGKILL"):
        run(engine, [])
    del engine
    free_engine_memory()
    assert not Path(f"/proc/{pid}").exists()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[tuple[Server, str]]:
    """A server of two ranks, and the mark of its processes. It does not outlive a failed test."""
    mark = uuid.uuid4().hex
    flags = ["--tensor-parallel-size", "2", "--threads", "2", "--attention-backend", "reference", "--dtype", "float32"]
    running = Server(tmp_path / "log", *flags, "--tool-call-parser", "hermes", env={"TEST_MARK": mark})
    yield running, mark
    running.process.kill()
    running.process.wait()


async def test_answers_are_unchanged_when_ranks_are_killed(server: tuple[Server, str]) -> None:
    quire_server, mark = server
    async with httpx.AsyncClient(base_url=quire_server.url, timeout=280) as client:
        expected = {kind: await answer(client, asked) for kind, asked in KINDS.items()}
        rng = random.Random(3)

        async def kill() -> None:
            for _ in range(KILLS):
                there = lambda: quire_server.healthy() and bool(ranks_of(mark))  # noqa: E731
                await asyncio.to_thread(wait_until, there, "no engine came after it")
                await asyncio.sleep(rng.uniform(0.5, 3.0))
                (pid,) = await asyncio.to_thread(ranks_of, mark)
                os.kill(pid, signal.SIGKILL)
                await asyncio.to_thread(wait_until, lambda gone=pid: gone not in ranks_of(mark), "a rank is left")

        await ask_until(asyncio.create_task(kill()), client, expected, STREAMS)
    assert quire_server.metric("quire:engine_deaths_total") == KILLS
    assert quire_server.metric("quire:quarantined_requests_total") == 0
    assert quire_server.metric("quire:ranks") == 2
    assert quire_server.stop() == 0
    assert marked(mark) == {}


@pytest.mark.parametrize("way", ["SIGTERM", "SIGKILL", "stopped"])
def test_no_rank_outlives_server(way: str, server: tuple[Server, str]) -> None:
    quire_server, mark = server
    if way == "stopped":
        os.kill(ranks_of(mark)[0], signal.SIGSTOP)
        quire_server.process.kill()
    else:
        quire_server.process.send_signal(getattr(signal, way))
    quire_server.process.wait(60)
    wait_until(lambda: marked(mark) == {}, f"{marked(mark)} are left")
