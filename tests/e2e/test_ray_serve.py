"""deploy/ray on a cluster of this machine alone; for a Python that has Ray."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from openai import AsyncOpenAI

from tests.e2e.server import free_port
from tests.tree import ROOT

ray = pytest.importorskip("ray", reason="Ray is not installed: see deploy/ray/requirements.txt")
serve = pytest.importorskip("ray.serve", reason="Ray Serve is not installed: see deploy/ray/requirements.txt")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(500)]

STREAMS = 100
PATIENCE = 200.0
"""Seconds in which Ray starts, a stream ends or replicas come and go, on a busy machine."""
PORTS = (
    *("--port", "--node-manager-port", "--object-manager-port", "--ray-client-server-port"),
    *("--metrics-export-port", "--dashboard-agent-listen-port", "--runtime-env-agent-port"),
)


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    """The address of a cluster that ends with the tests."""
    ports = {name: str(free_port()) for name in PORTS}
    flags = [part for pair in ports.items() for part in pair]
    with tempfile.TemporaryDirectory(prefix="quire-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        command = [beside("ray"), "start", "--head", "--block", "--num-cpus", "4", "--disable-usage-stats"]
        command += ["--include-dashboard", "false", "--object-store-memory", "100000000", "--temp-dir", folder, *flags]
        running = subprocess.Popen(command, env=environment(), cwd=ROOT, stdout=subprocess.DEVNULL)
        address = f"127.0.0.1:{ports['--port']}"
        try:
            wait_for(lambda: joined(address), running)
            yield address
        finally:
            ray.shutdown()
            running.terminate()
            running.wait(PATIENCE)


def joined(address: str) -> bool:
    try:
        ray.init(address, log_to_driver=False, namespace="serve", ignore_reinit_error=True)
    except (ConnectionError, ValueError):
        return False
    return True


def beside(name: str) -> str:
    return str(Path(sys.executable).with_name(name))


def environment(**more: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "PYTEST_"))}
    return kept | {"PYTHONPATH": str(ROOT)} | more


def wait_for(condition: Any, running: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert running.poll() is None, "it ended"
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.2)


@contextmanager
def serving(cluster: str, folder: Path, **replica: Any) -> Iterator[str]:
    """The URL of what `serve run` makes of deploy/ray/serve.yaml, with other settings of the replicas."""
    config = yaml.safe_load((ROOT / "deploy/ray/serve.yaml").read_text(encoding="utf-8"))
    config["http_options"]["port"] = port = free_port()
    config["applications"][0]["args"] = {"threads": 1}
    for deployment in config["applications"][0]["deployments"]:
        if deployment["name"] == "Replica":
            if "num_replicas" in replica:
                del deployment["autoscaling_config"]
            deployment |= replica
    path = folder / "serve.yaml"
    path.write_text(yaml.safe_dump(config))
    url = f"http://127.0.0.1:{port}"
    with (folder / "log").open("wb") as log:
        running = subprocess.Popen(
            [beside("serve"), "run", str(path)],
            env=environment(RAY_ADDRESS=cluster),
            cwd=ROOT,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    try:
        wait_for(lambda: answers(url), running)
        yield url
    finally:
        serve.shutdown()  # as Ctrl-C for `serve run`, but this process forgets what ended, too
        running.kill()
        running.wait()


def answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=10).status_code == 200
    except httpx.TransportError:
        return False


def replicas() -> dict[str, int]:
    """By state: how many there are."""
    deployments = serve.status().applications["quire"].deployments
    return {
        str(getattr(state, "value", state)): count for state, count in deployments["Replica"].replica_states.items()
    }


def pids() -> dict[str, int]:
    """By name: the processes of the replicas."""
    from ray._private import state  # what is public needs the dashboard

    named = {each["Name"]: each["Pid"] for each in state.actors().values() if each["State"] == "ALIVE"}
    return {name.rpartition("#")[2]: pid for name, pid in named.items() if "#Replica#" in name}


def metric(text: str, name: str) -> dict[str, float]:
    """By replica."""
    return {replica: float(value) for replica, value in re.findall(rf'^{name}{{.*replica="(\w+)"}} (\S+)', text, re.M)}


def asked(index: int) -> dict[str, Any]:
    """A chat with one of ten long prefixes."""
    story = f"Story {index % 10}. " + "The king went to the sea, and there he saw a fish. " * 12
    return {
        "model": "quire-demo",
        "messages": [{"role": "system", "content": story}, {"role": "user", "content": f"Go on, {index}"}],
        "max_tokens": 200,
        "temperature": 1.0,
        "extra_body": {"ignore_eos": True},
    }


async def pieces(client: AsyncOpenAI, call: dict[str, Any]) -> AsyncIterator[str]:
    """The texts of a stream; the reason for its end is the last."""
    reason = None
    async for chunk in await client.chat.completions.create(stream=True, **call):
        for choice in chunk.choices:
            yield choice.delta.content or ""
            reason = choice.finish_reason or reason
    yield f"[{reason}]"


async def test_streams_outlive_a_replica(cluster: str, tmp_path: Path) -> None:
    with serving(cluster, tmp_path, num_replicas=2) as url:
        async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=5, timeout=PATIENCE) as client:
            while replicas().get("RUNNING") != 2:  # noqa: ASYNC110 - nothing tells it
                await asyncio.sleep(0.2)
            calls = [asked(index) | {"seed": index} for index in range(STREAMS)]
            wholes = await asyncio.gather(*[client.chat.completions.create(**call) for call in calls])
            got: list[list[str]] = [[] for _ in calls]

            async def read(index: int) -> None:
                async for piece in pieces(client, calls[index]):
                    got[index].append(piece)

            reading = [asyncio.create_task(read(index)) for index in range(STREAMS)]
            while sum(len(each) > 10 for each in got) < STREAMS // 2:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
            running = metric((await asyncio.to_thread(httpx.get, f"{url}/metrics")).text, "vllm:num_requests_running")
            victim = max(running, key=running.__getitem__)
            assert running[victim] > 0
            assert len(running) == 2
            os.kill(pids()[victim], signal.SIGKILL)
            await asyncio.wait_for(asyncio.gather(*reading), PATIENCE)
            expected = [f"{each.choices[0].message.content}[{each.choices[0].finish_reason}]" for each in wholes]
            assert ["".join(each) for each in got] == expected
            while replicas().get("RUNNING") != 2:  # noqa: ASYNC110
                await asyncio.sleep(0.2)
            assert victim not in pids()
    assert "its replica was lost" in (tmp_path / "log").read_text()


async def test_replicas_follow_the_queue_and_drain(cluster: str, tmp_path: Path) -> None:
    scaling = {"min_replicas": 1, "max_replicas": 2, "target_ongoing_requests": 4}
    scaling |= {"upscale_delay_s": 1, "downscale_delay_s": 3, "look_back_period_s": 3}
    with serving(cluster, tmp_path, autoscaling_config=scaling) as url:
        async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=5, timeout=PATIENCE) as client:
            assert replicas() == {"RUNNING": 1}
            busy = True
            ended: list[str] = []

            async def user(index: int) -> None:
                while busy or index < 3:
                    *_, last = [piece async for piece in pieces(client, asked(index))]
                    ended.append(last)
                    if not busy and replicas() == {"RUNNING": 1}:
                        return

            users = [asyncio.create_task(user(index)) for index in range(16)]
            async with asyncio.timeout(PATIENCE):
                while replicas().get("RUNNING") != 2:  # noqa: ASYNC110
                    await asyncio.sleep(0.2)
                busy = False  # three go on, with answers while the second replica ends
                await asyncio.gather(*users)
            assert replicas() == {"RUNNING": 1}
            assert set(ended) == {"[length]"}
    assert "its replica was lost" not in (tmp_path / "log").read_text()
