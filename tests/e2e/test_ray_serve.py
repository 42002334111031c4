"""deploy/ray on a one-machine cluster; needs a Python with Ray."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Mapping
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
"""Seconds for Ray to start, a stream to end or replicas to change on a busy machine."""
WORKED_ON = ("queued", "in_progress", "validating", "finalizing")
PORTS = (
    *("--port", "--node-manager-port", "--object-manager-port", "--ray-client-server-port"),
    *("--metrics-export-port", "--dashboard-agent-listen-port", "--runtime-env-agent-port"),
)


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    """Address of a cluster that ends with the tests."""
    ports = {name: str(free_port()) for name in PORTS}
    flags = [part for pair in ports.items() for part in pair]
    with tempfile.TemporaryDirectory(prefix="quire-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        command = [executable_path("ray"), "start", "--head", "--block", "--num-cpus", "4", "--disable-usage-stats"]
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


def executable_path(name: str) -> str:
    return str(Path(sys.executable).with_name(name))


def environment(**more: str) -> dict[str, str]:
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "PYTEST_"))}
    return variables | {"PYTHONPATH": str(ROOT)} | more


def wait_for(condition: Any, running: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert running.poll() is None, "it ended"
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.2)


@contextmanager
def serving(cluster: str, folder: Path, args: Mapping[str, Any] | None = None, **replica: Any) -> Iterator[str]:
    """Run deploy/ray/serve.yaml with `serve run`, with these `args` and replica settings; yield its URL."""
    config = yaml.safe_load((ROOT / "deploy/ray/serve.yaml").read_text(encoding="utf-8"))
    config["http_options"]["port"] = port = free_port()
    config["applications"][0]["args"] = {"threads": 1, **(args or {})}
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
            [executable_path("serve"), "run", str(path)],
            env=environment(RAY_ADDRESS=cluster),
            cwd=ROOT,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    try:
        wait_for(lambda: answers(url), running)
        yield url
    finally:
        serve.shutdown()  # like Ctrl-C for `serve run`, and this process forgets the ended deployment, too
        running.kill()
        running.wait()


def answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=10).status_code == 200
    except httpx.TransportError:
        return False


def replicas() -> dict[str, int]:
    """Number of replicas by state."""
    deployments = serve.status().applications["quire"].deployments
    return {
        str(getattr(state, "value", state)): count for state, count in deployments["Replica"].replica_states.items()
    }


def pids(deployment: str = "Replica") -> dict[str, int]:
    """Process ids of the deployment's replicas by name."""
    from ray._private import state  # the public API needs the dashboard

    named = {each["Name"]: each["Pid"] for each in state.actors().values() if each["State"] == "ALIVE"}
    return {name.rpartition("#")[2]: pid for name, pid in named.items() if f"#{deployment}#" in name}


def metric(text: str, name: str) -> dict[str, float]:
    """Value by replica."""
    return {replica: float(value) for replica, value in re.findall(rf'^{name}{{.*replica="(\w+)"}} (\S+)', text, re.M)}


def asked(index: int) -> dict[str, Any]:
    """A chat request with one of ten long prefixes."""
    story = f"Story {index % 10}. " + "The king went to the sea, and there he saw a fish. " * 12
    return {
        "model": "quire-demo",
        "messages": [{"role": "system", "content": story}, {"role": "user", "content": f"Go on, {index}"}],
        "max_tokens": 200,
        "temperature": 1.0,
        "extra_body": {"ignore_eos": True},
    }


async def pieces(client: AsyncOpenAI, call: dict[str, Any]) -> AsyncIterator[str]:
    """Yield the texts of a stream, then its finish reason."""
    reason = None
    async for chunk in await client.chat.completions.create(stream=True, **call):
        for choice in chunk.choices:
            yield choice.delta.content or ""
            reason = choice.finish_reason or reason
    yield f"[{reason}]"


async def test_streams_survive_killed_ray_replica(cluster: str, tmp_path: Path) -> None:
    with serving(cluster, tmp_path, num_replicas=2) as url:
        async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=5, timeout=PATIENCE) as client:
            while replicas().get("RUNNING") != 2:  # noqa: ASYNC110 - nothing tells it
                await asyncio.sleep(0.2)
            calls = [asked(index) | {"seed": index} for index in range(STREAMS)]
            wholes = await asyncio.gather(*[client.chat.completions.create(**call) for call in calls])
            streamed: list[list[str]] = [[] for _ in calls]

            async def read(index: int) -> None:
                async for piece in pieces(client, calls[index]):
                    streamed[index].append(piece)

            reading = [asyncio.create_task(read(index)) for index in range(STREAMS)]
            while sum(len(each) > 10 for each in streamed) < STREAMS // 2:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
            running = metric((await asyncio.to_thread(httpx.get, f"{url}/metrics")).text, "vllm:num_requests_running")
            victim = max(running, key=running.__getitem__)
            assert running[victim] > 0
            assert len(running) == 2
            os.kill(pids()[victim], signal.SIGKILL)
            await asyncio.wait_for(asyncio.gather(*reading), PATIENCE)
            expected = [f"{each.choices[0].message.content}[{each.choices[0].finish_reason}]" for each in wholes]
            assert ["".join(each) for each in streamed] == expected
            while replicas().get("RUNNING") != 2:  # noqa: ASYNC110
                await asyncio.sleep(0.2)
            assert victim not in pids()
    assert "its replica was lost" in (tmp_path / "log").read_text()


async def test_ray_replicas_scale_with_queue_and_drain_streams(cluster: str, tmp_path: Path) -> None:
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
                busy = False  # three users continue while the second replica ends
                await asyncio.gather(*users)
            assert replicas() == {"RUNNING": 1}
            assert set(ended) == {"[length]"}
    assert "its replica was lost" not in (tmp_path / "log").read_text()


def bodies(number: int) -> tuple[str, dict[str, Any]]:
    """Path and body of a stream: any API, two choices, or a tool call."""
    chat_body = {"messages": [{"role": "user", "content": f"Tell me of {number}"}], "temperature": 1.0, "seed": number}
    chat_body |= {"model": "quire-demo", "stream": True, "max_tokens": 300, "ignore_eos": True}
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    match number % 5:
        case 0:
            return "/v1/chat/completions", chat_body | {"n": 2}
        case 1:
            return "/v1/chat/completions", chat_body | {"tools": [tool], "tool_choice": "required"}
        case 2:
            return "/v1/messages", {name: chat_body[name] for name in ("messages", "model", "stream", "max_tokens")}
        case 3:
            return "/v1/chat/completions", chat_body | {"logprobs": True, "top_logprobs": 2}
    asked = {"input": f"Tell me of {number}", "max_output_tokens": 300, "temperature": 1.0}
    return "/v1/responses", asked | {"model": "quire-demo", "stream": True}


def ids(events: bytes) -> list[str]:
    return re.findall(r"^id: (.*)$", events.decode(), re.M)


def events_by_id(events: bytes) -> dict[str, bytes]:
    """Events by id, without the time of an answer's end."""
    events_found = {
        ids(each)[0]: re.sub(rb'"completed_at":\d+', b"", each) for each in events.split(b"\n\n") if ids(each)
    }
    assert len(events_found) == len(ids(events)), "an event came twice"
    return events_found


def texts(events: bytes) -> dict[int, str]:
    """Text of each choice of a chat."""
    choice_texts: dict[int, str] = {}
    for each in re.findall(rb"^data: ({.*)$", events, re.M):
        for choice in json.loads(each)["choices"]:
            choice_texts[choice["index"]] = choice_texts.get(choice["index"], "") + (
                choice["delta"].get("content") or ""
            )
    return choice_texts


async def test_streams_batches_and_responses_survive_killed_replicas_and_journal(cluster: str, tmp_path: Path) -> None:
    """Replicas and the actor that owns data_dir are killed during streams, a batch and background responses."""
    with serving(cluster, tmp_path, {"data_dir": str(tmp_path / "da ta")}, num_replicas=2) as url:
        async with httpx.AsyncClient(base_url=url, timeout=PATIENCE) as http:
            while replicas().get("RUNNING") != 2:  # noqa: ASYNC110
                await asyncio.sleep(0.2)

            async def until_answered(method: str, path: str, **body: Any) -> httpx.Response:
                while (answer := await http.request(method, path, **body)).status_code in (409, 503):  # noqa: ASYNC110
                    await asyncio.sleep(0.5)
                return answer

            async def stream(number: int) -> tuple[str, bytes]:
                path, body = bodies(number)
                async with http.stream("POST", path, json=body) as answer:
                    assert answer.status_code == 200, await answer.aread()
                    return answer.headers["x-stream-id"], b"".join([each async for each in answer.aiter_raw()])

            async def ended(path: str) -> dict[str, Any]:
                while (output_bodies := (await until_answered("GET", path)).json())["status"] in WORKED_ON:  # noqa: ASYNC110
                    await asyncio.sleep(0.5)
                return dict(output_bodies)

            line = {"method": "POST", "url": "/v1/completions"}
            completion_body = {"model": "quire-demo", "prompt": "Once", "max_tokens": 40, "temperature": 1.0}
            lines = [line | {"custom_id": f"r{n}", "body": completion_body | {"seed": n}} for n in range(120)]
            content = "\n".join(map(json.dumps, lines)).encode()
            uploaded = await http.post("/v1/files", data={"purpose": "batch"}, files={"file": ("in.jsonl", content)})
            assert uploaded.status_code == 200, uploaded.text
            batch = (
                await http.post(
                    "/v1/batches",
                    json={
                        "input_file_id": uploaded.json()["id"],
                        "endpoint": "/v1/completions",
                        "completion_window": "24h",
                    },
                )
            ).json()
            answer = {"model": "quire-demo", "input": "Once", "max_output_tokens": 400, "background": True}
            background = [(await http.post("/v1/responses", json=answer)).json()["id"] for _ in range(3)]
            reading = [asyncio.create_task(stream(number)) for number in range(20)]
            await asyncio.sleep(3)
            os.kill(next(iter(pids().values())), signal.SIGKILL)
            await asyncio.sleep(2)
            os.kill(next(iter(pids("Journal").values())), signal.SIGKILL)
            streams = await asyncio.wait_for(asyncio.gather(*reading), PATIENCE)
            while replicas().get("RUNNING") != 2:  # noqa: ASYNC110
                await asyncio.sleep(0.2)
            reading = [asyncio.create_task(stream(number)) for number in range(20, 30)]
            await asyncio.sleep(1)
            os.kill(next(iter(pids().values())), signal.SIGKILL)
            streams += await asyncio.wait_for(asyncio.gather(*reading), PATIENCE)
            for number, (id, events) in enumerate(streams):
                again = await until_answered("GET", f"/v1/streams/{id}")  # any replica has all of it, byte for byte
                if number % 5:
                    assert events_by_id(again.content) == events_by_id(events)
                else:  # its choices come in any order
                    assert texts(again.content) == texts(events)
                half = ids(events)[len(ids(events)) // 2]
                rest = await until_answered("GET", f"/v1/streams/{id}", headers={"Last-Event-ID": half})
                joined = events_by_id(events[: events.index(f"id: {half}\n".encode())])
                assert len(joined) + 1 + len(events_by_id(rest.content)) == len(events_by_id(events))
            for id in background:
                assert (await ended(f"/v1/responses/{id}"))["status"] in ("completed", "incomplete")
            done = await ended(f"/v1/batches/{batch['id']}")
            assert done["request_counts"] == {"total": 120, "completed": 120, "failed": 0}
            output = (await until_answered("GET", f"/v1/files/{done['output_file_id']}/content")).text.splitlines()
            output_bodies = {each["custom_id"]: each["response"]["body"] for each in map(json.loads, output)}
            assert len(output_bodies) == len(output) == 120
            for each in lines[::30]:
                whole = (await until_answered("POST", "/v1/completions", json=each["body"])).json()
                assert output_bodies[each["custom_id"]]["choices"] == whole["choices"]
    assert "its replica was lost" in (tmp_path / "log").read_text()
