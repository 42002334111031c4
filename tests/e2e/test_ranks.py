"""Servers with tensor, pipeline or decode-context parallel ranks: a rank's death is survived like an engine's, and no
rank outlives its server.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from quire.engine.common.config import DEMO_MODEL, EngineConfig
from quire.engine.common.errors import EngineError
from quire.engine.engine_core import EngineCore, free_engine_memory
from quire.engine.worker.ranks.pipeline import LastStageRunner
from quire.engine.worker.ranks.spmd import SpmdRunner
from quire.kernels.cpu.backend import CpuBackend
from tests.e2e.server import Server
from tests.e2e.streams import KINDS, answer, ask_until
from tests.engine.harness import request, run

MISSING = CpuBackend().missing_reason
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(MISSING is not None, reason=str(MISSING)),
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc"),
]
STREAMS = 32
KILLS = int(os.environ.get("TEST_KILLS", "6"))
FOLLOWER = b"quire.engine.worker.ranks.follower"


def marked(mark: str) -> dict[int, bytes]:
    """Command lines, by process id, of the processes with this value in their environment."""
    command_lines = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (folder / "environ").read_bytes():
                command_lines[int(folder.name)] = (folder / "cmdline").read_bytes()
        except OSError:  # it has ended, or belongs to another user
            continue
    return command_lines


def ranks_of(mark: str) -> list[int]:
    return [pid for pid, command in marked(mark).items() if FOLLOWER in command]


def wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


Start = Callable[..., tuple[Server, str]]


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Start]:
    """Starts a server of `ranks` ranks; returns it and the mark of its processes. None outlives a failed test."""
    servers: list[Server] = []

    def start(ranks: int, *, how: str = "tensor", wait: bool = True) -> tuple[Server, str]:
        mark = uuid.uuid4().hex
        divided = [f"--{how}-parallel-size", str(ranks), "--threads", str(ranks), "--tool-call-parser", "hermes"]
        if how == "decode-context":
            divided += ["--tensor-parallel-size", str(ranks)]
        servers.append(Server(tmp_path / "log", *divided, env={"TEST_MARK": mark}, wait=wait))
        return servers[-1], mark

    yield start
    for server in servers:
        server.process.kill()
        server.process.wait()


@pytest.mark.parametrize("dividing", [1, 2], ids=["heads", "tokens"])
def test_in_process_engine_error_names_killed_rank(dividing: int) -> None:
    settings = {"max_model_len": 256, "num_kv_blocks": 64, "threads": 1}
    ranks = {"tensor_parallel_size": 2, "decode_context_parallel_size": dividing}
    engine = EngineCore(EngineConfig(model=DEMO_MODEL, **ranks, **settings))
    expected = run(EngineCore(EngineConfig(model=DEMO_MODEL, dtype="float32", **settings)), [request("a", [435, 1029])])
    assert len(run(engine, [request("a", [435, 1029])])["a"].ids) == len(expected["a"].ids)
    assert isinstance(engine.executor, SpmdRunner)
    (pid,) = engine.executor._ranks.pids
    engine.add_request(request("b", [435, 1029]))
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(EngineError, match=f"rank 1 of 2 .process {pid}. was killed by SIGKILL"):
        run(engine, [])
    del engine
    free_engine_memory()
    assert not Path(f"/proc/{pid}").exists()


def test_in_process_engine_error_names_killed_pipeline_stage() -> None:
    """The other stage does not end by itself: it learns of the first one's end from the engine."""
    settings = {"max_model_len": 256, "num_kv_blocks": 64, "threads": 1, "dtype": "float32"}
    engine = EngineCore(EngineConfig(model=DEMO_MODEL, pipeline_parallel_size=3, **settings))
    alone = EngineCore(EngineConfig(model=DEMO_MODEL, **settings))
    requests = [request(str(i), [435, 1029 + i], seed=i, temperature=0.8, logprobs=0) for i in range(4)]
    assert run(engine, requests) == run(alone, requests)
    assert isinstance(engine.executor, LastStageRunner)
    pids = engine.executor._stages.pids
    engine.add_request(request("b", [435, 1029]))
    os.kill(pids[0], signal.SIGKILL)
    with pytest.raises(EngineError, match=f"rank 1 of 3 .process {pids[0]}. was killed by SIGKILL"):
        run(engine, [])
    assert Path(f"/proc/{pids[1]}").exists()
    del engine
    free_engine_memory()
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


@pytest.mark.parametrize(
    ("how", "ranks"), [("tensor", 2), ("pipeline", 2), ("tensor", 4), ("pipeline", 3), ("decode-context", 2)]
)
async def test_answers_are_unchanged_when_ranks_are_killed(how: str, ranks: int, started: Start) -> None:
    server, mark = started(ranks, how=how)
    limits = httpx.Limits(max_connections=STREAMS + 1)
    async with httpx.AsyncClient(base_url=server.url, timeout=280, limits=limits) as client:
        expected = {kind: await answer(client, asked) for kind, asked in KINDS.items()}
        rng = random.Random(ranks)

        def ready() -> bool:
            """A server reports itself healthy until it has noticed a death, so ranks are checked, too."""
            return server.healthy() and bool(ranks_of(mark))

        async def kill() -> int:
            for _ in range(KILLS):
                await asyncio.to_thread(wait_until, ready, "no engine came after it")
                await asyncio.sleep(rng.uniform(0.0, 1.0))
                pids = await asyncio.to_thread(ranks_of, mark)
                os.kill(rng.choice(pids), signal.SIGKILL)
                await asyncio.to_thread(wait_until, lambda gone=pids: not {*gone} & {*ranks_of(mark)}, "a rank is left")
            return KILLS

        await ask_until(asyncio.create_task(kill()), client, expected, STREAMS)
    assert server.metric("quire:engine_deaths_total") > 0
    assert server.metric("quire:quarantined_requests_total") == 0
    assert len(ranks_of(mark)) == ranks - 1
    assert server.stop() == 0
    assert marked(mark) == {}


@pytest.mark.parametrize("how", ["tensor", "pipeline"])
@pytest.mark.parametrize("way", ["SIGTERM", "stopped", "starting"])
def test_no_rank_outlives_server(way: str, how: str, started: Start) -> None:
    server, mark = started(2, how=how, wait=way != "starting")
    if way == "starting":
        wait_until(lambda: bool(ranks_of(mark)), "no rank was started")
        server.process.kill()
    elif way == "stopped":
        os.kill(ranks_of(mark)[0], signal.SIGSTOP)
        server.process.kill()
    else:
        server.process.send_signal(signal.SIGTERM)
    server.process.wait(60)
    wait_until(lambda: marked(mark) == {}, f"{marked(mark)} are left")


def test_serve_rejects_tensor_parallel_size_that_does_not_divide_heads() -> None:
    mark = uuid.uuid4().hex
    quire = Path(sys.executable).with_name("quire")
    command = [str(quire), "serve", "--port", "0", "--tensor-parallel-size", "3"]
    completed = subprocess.run(
        command, capture_output=True, text=True, timeout=120, env=os.environ | {"TEST_MARK": mark}
    )
    assert completed.returncode != 0
    assert "tensor_parallel_size: the model's " in completed.stderr
    assert "heads cannot be divided among 3 ranks" in completed.stderr
    assert marked(mark) == {}
