"""A model on two nodes, here two process trees on loopback: every death on either node is survived, and no process
outlives its command.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

import httpx
import pytest

from quire.engine.common.config import DEMO_MODEL
from quire.engine.worker_node import WorkerNode
from quire.kernels.cpu.backend import CpuBackend
from tests.e2e.server import Server, children, free_port
from tests.e2e.streams import KINDS, answer, ask_until
from tests.e2e.test_ranks import FOLLOWER, marked, ranks_of, wait_until
from tests.engine.nodes import gathering, member_config, told

MISSING = CpuBackend().missing_reason
pytestmark = [
    pytest.mark.skipif(MISSING is not None, reason=str(MISSING)),
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc"),
    pytest.mark.slow,
]
STREAMS = 8
KILLS = int(os.environ.get("TEST_KILLS", "3"))
QUIRE = str(Path(sys.executable).with_name("quire"))


class Machines:
    """Node 0 serves; node 1 is a command that tests end and start again."""

    def __init__(self, folder: Path, ranks: int = 2) -> None:
        self.marks = uuid.uuid4().hex, uuid.uuid4().hex
        self.second_log = folder / "second"
        self._flags = ["--tensor-parallel-size", str(ranks), "--nnodes", "2"]
        self._launched = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        """Variables as torchrun sets them, without RANK."""
        self._flags += ["--threads", str(ranks // 2), "--tool-call-parser", "hermes"]
        self.join()
        self.server = Server(folder / "first", *self._flags, env=self._variables(0), wait=False)

    def _variables(self, rank: int) -> dict[str, str]:
        return self._launched | {"RANK": str(rank), "TEST_MARK": self.marks[rank]}

    def join(self) -> None:
        with self.second_log.open("ab") as log:
            self.second = subprocess.Popen(
                [QUIRE, "serve", *self._flags],
                stdout=log,
                stderr=subprocess.STDOUT,
                env=os.environ | self._variables(1),
            )

    def end(self) -> None:
        for process in (self.server.process, self.second):
            process.kill()
            process.wait()


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[Callable[..., Machines]]:
    started: list[Machines] = []

    def start(ranks: int = 2) -> Machines:
        started.append(Machines(tmp_path, ranks))
        started[-1].server.wait()
        return started[-1]

    yield start
    for each in started:
        each.end()


def kill_first(pids: list[int]) -> None:
    os.kill(pids[0], signal.SIGKILL)


def kill_rank(made: Machines) -> None:
    kill_first(ranks_of(made.marks[1]))


def kill_command(made: Machines) -> None:
    made.second.kill()
    made.second.wait()
    made.join()


def kill_engine(made: Machines) -> None:
    kill_first(made.server.engine_pids())


@pytest.mark.parametrize("ranks", [2, 4])
async def test_answers_are_unchanged_when_processes_of_either_node_die(
    ranks: int, machines: Callable[..., Machines]
) -> None:
    cluster = await asyncio.to_thread(machines, ranks)
    server, rng = cluster.server, random.Random(ranks)
    ways = [kill_rank, kill_command, kill_engine]
    async with httpx.AsyncClient(base_url=server.url, timeout=280) as client:
        expected = {kind: await answer(client, asked) for kind, asked in KINDS.items()}

        def ready() -> bool:
            return server.healthy() and bool(ranks_of(cluster.marks[1])) and bool(server.engine_pids())

        async def kill() -> None:
            for way in ways[:KILLS]:
                await asyncio.to_thread(wait_until, ready, "no engine came after it")
                await asyncio.sleep(rng.uniform(0.2, 1.0))
                deaths = server.metric("quire:engine_deaths_total")
                await asyncio.to_thread(way, cluster)
                more = lambda before=deaths: server.metric("quire:engine_deaths_total") > before  # noqa: E731
                await asyncio.to_thread(wait_until, more, "the engine did not notice")

        await ask_until(asyncio.create_task(kill()), client, expected, STREAMS)
    assert server.metric("quire:engine_deaths_total") >= min(KILLS, len(ways))
    assert server.metric("quire:quarantined_requests_total") == 0
    assert server.metric("quire:nodes") == 2
    assert server.stop() == 0
    assert marked(cluster.marks[0]) == {}
    assert cluster.second.poll() is None
    cluster.second.send_signal(signal.SIGTERM)
    assert cluster.second.wait(60) == 0
    assert marked(cluster.marks[1]) == {}


def test_ranks_rejoin_rendezvous_within_10_seconds_after_each_death(machines: Callable[..., Machines]) -> None:
    """If the machine is so busy that a start takes longer, the limit is the time of a start."""
    began = time.monotonic()
    cluster = machines()
    seconds = max(10.0, time.monotonic() - began)
    for way in (kill_rank, kill_command, kill_engine):
        wait_until(lambda: cluster.server.healthy() and bool(ranks_of(cluster.marks[1])), "no engine came after it")
        joined, began = cluster.second_log.read_text().count("has joined"), time.monotonic()
        way(cluster)
        again = lambda before=joined: cluster.second_log.read_text().count("has joined") > before  # noqa: E731
        wait_until(again, f"{way.__name__}: it did not join again")
        assert time.monotonic() - began < seconds, way.__name__


def test_stopped_remote_rank_is_replaced_after_engine_kill(machines: Callable[..., Machines]) -> None:
    cluster = machines()
    (stopped,) = ranks_of(cluster.marks[1])
    os.kill(stopped, signal.SIGSTOP)
    kill_engine(cluster)
    wait_until(lambda: cluster.server.metric("quire:engine_deaths_total") == 1, "the engine did not notice")
    wait_until(lambda: cluster.server.healthy() and bool(cluster.server.engine_pids()), "no engine came after it")
    body = {"prompt": "Once upon a time", "max_tokens": 5}
    assert httpx.post(f"{cluster.server.url}/v1/completions", json=body, timeout=120).status_code == 200
    assert stopped not in ranks_of(cluster.marks[1])


def test_request_completes_soon_when_remote_rank_is_stopped(machines: Callable[..., Machines]) -> None:
    """Without detection the request would wait for the step timeout of two minutes."""
    cluster = machines()
    body = {"prompt": "Once upon a time", "max_tokens": 300, "temperature": 0, "ignore_eos": True}
    url = f"{cluster.server.url}/v1/completions"
    expected = httpx.post(url, json=body, timeout=120).json()["choices"]
    (stopped,) = ranks_of(cluster.marks[1])
    os.kill(stopped, signal.SIGSTOP)
    assert httpx.post(url, json=body, timeout=60).json()["choices"] == expected
    assert cluster.server.metric("quire:engine_deaths_total") == 1
    assert stopped not in ranks_of(cluster.marks[1])


async def test_worker_node_rejoins_restarted_server(machines: Callable[..., Machines]) -> None:
    cluster = await asyncio.to_thread(machines)
    async with httpx.AsyncClient(base_url=cluster.server.url, timeout=280) as client:
        before = await answer(client, KINDS["seeded"])
    cluster.server.process.kill()
    cluster.server.process.wait()
    with Server(cluster.second_log.with_name("again"), *cluster._flags, env=cluster._variables(0)) as restarted:
        async with httpx.AsyncClient(base_url=restarted.url, timeout=280) as client:
            assert await answer(client, KINDS["seeded"]) == before
        assert cluster.second.poll() is None
        async with httpx.AsyncClient(base_url=restarted.url, timeout=280) as client:
            for path in ("/sleep", "/wake_up"):
                assert (await client.post(path)).status_code == 200
            assert await answer(client, KINDS["seeded"]) == before
            assert (await client.post("/update_weights", json={"path": DEMO_MODEL})).status_code == 200
            assert restarted.metric("quire:engine_deaths_total") == 0
            assert await answer(client, KINDS["seeded"]) == before
            group = {"master_address": "127.0.0.1", "master_port": free_port(), "rank": 1, "world_size": 2}
            refused = await client.post("/init_weights_group", json=group)
        assert refused.status_code == 400
        assert "nnodes" in refused.text


@pytest.mark.parametrize("way", ["SIGINT", "SIGTERM", "SIGKILL", "waiting"])
def test_no_rank_outlives_its_worker_node(way: str, machines: Callable[..., Machines]) -> None:
    cluster = machines()
    if way == "waiting":
        cluster.server.process.kill()
        cluster.server.process.wait()
        wait_until(lambda: "waits for machine 0" in cluster.second_log.read_text(), "it does not say that it waits")
        way = "SIGTERM"
    cluster.second.send_signal(getattr(signal, way))
    assert cluster.second.wait(60) == (-signal.SIGKILL if way == "SIGKILL" else 0)
    wait_until(lambda: marked(cluster.marks[1]) == {}, f"{marked(cluster.marks[1])} are left")


def test_worker_node_exits_with_reason_when_join_fails() -> None:
    command = [QUIRE, "serve", "--tensor-parallel-size", "2", "--nnodes", "2", "--node-rank", "1"]
    mark = uuid.uuid4().hex
    late = [*command, "--master-port", str(free_port()), "--nodes-timeout", "1"]
    completed = subprocess.run(late, capture_output=True, text=True, timeout=120, env=os.environ | {"TEST_MARK": mark})
    assert completed.returncode == 1
    assert "master_addr: no machine 0 at 127.0.0.1:" in completed.stderr
    assert marked(mark) == {}
    completed = subprocess.run([*command, "--nnodes", "3"], capture_output=True, text=True, timeout=120)
    assert completed.returncode == 2
    assert "nnodes: tensor_parallel_size 2 cannot be divided evenly among 3 machines" in completed.stderr


@pytest.mark.parametrize(("kernel_kills", "code"), [(True, 137), (False, -signal.SIGKILL)])
def test_remote_rank_exit_code_tells_oom_kill_from_sigkill(
    kernel_kills: bool, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Node 0 cannot count the OOM kills of another node's kernel."""
    kills = count()
    monkeypatch.setattr("quire.engine.worker_node.oom_kills", lambda: next(kills) if kernel_kills else 3)
    settings = told()
    member = WorkerNode(member_config(settings))
    keeping = threading.Thread(target=member.keep_rank_running, args=(0,), daemon=True)
    keeping.start()
    pids = set()
    for _ in range(2):  # the next rank may be killed while it waits; then another one waits
        _, thread, remote_ranks = gathering(settings)
        thread.join(60)
        (remote,) = remote_ranks
        os.kill(remote.pid, signal.SIGKILL)
        assert remote.wait() == code
        pids.add(remote.pid)
        while not (waiting := {*children(os.getpid(), FOLLOWER)} - pids):
            time.sleep(0.05)
        for pid in waiting:
            os.kill(pid, signal.SIGKILL)
    assert len(pids) == 2
    member.stop_event.set()
    keeping.join(30)
    assert not keeping.is_alive()
    assert member.failure is None
