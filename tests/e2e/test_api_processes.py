"""Several API processes in front of one engine answer like one process, and a dead process loses only its own
connections.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from quire.engine.common.config import DEMO_MODEL
from quire.engine.common.errors import ConfigError
from quire.server.cli.api_process_manager import check_multi_process_settings
from quire.server.config import ServerConfig
from tests.e2e.server import Server
from tests.e2e.streams import COMPLETIONS, KINDS, answer, ask_until

pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")]
FLAGS = ("--threads", "2", "--tool-call-parser", "hermes")
LONG = {"prompt": "Once upon a time", "temperature": 1.0, "seed": 3, "max_tokens": 1200, "ignore_eos": True}
"""Long enough that all of STREAMS run at once, however slow the start of each is."""
STREAMS, LOOKS, KILLS = 24, 12, 2


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Answers of a server with one process."""

    async def ask(server: Server) -> dict[str, Any]:
        async with httpx.AsyncClient(base_url=server.url, timeout=280) as client:
            return {kind: await answer(client, asked) for kind, asked in (KINDS | {"long": LONG}).items()}

    with Server(tmp_path_factory.mktemp("one") / "log", *FLAGS) as server:
        return asyncio.run(ask(server))


@asynccontextmanager
async def served(log: Path, *flags: str) -> AsyncIterator[tuple[Server, httpx.AsyncClient]]:
    with Server(log, *FLAGS, "--api-server-count", "2", *flags) as server:
        await wait_until(lambda: "ready " in log.read_text())
        # Every request opens its own connection, so that each API process gets some.
        limits = httpx.Limits(max_keepalive_connections=0)
        async with httpx.AsyncClient(base_url=server.url, timeout=280, limits=limits) as client:
            yield server, client


async def wait_until(holds: Callable[[], bool], seen: Callable[[], object] = str) -> None:
    """Poll `holds` in a thread, because streams are read meanwhile. `seen` is printed on failure."""
    try:
        async with asyncio.timeout(120):
            while not await asyncio.to_thread(holds):  # noqa: ASYNC110 - a poll is soon enough
                await asyncio.sleep(0.02)
    except TimeoutError:
        pytest.fail(f"it never came to hold: {seen()}")


async def wait_for_running_requests(server: Server, count: int) -> None:
    await wait_until(
        lambda: server.metric("vllm:num_requests_running") == count,
        lambda: (server.get("/metrics").text, server.log.read_text()),
    )


@pytest.mark.parametrize("engines", [1, 2])
async def test_api_processes_answer_like_one_process_when_engines_die(
    engines: int, tmp_path: Path, expected: dict[str, Any]
) -> None:
    rng = random.Random(1)
    async with served(tmp_path / "log", "--data-parallel-size", str(engines)) as (server, client):

        async def kill() -> None:
            for kills in range(KILLS):
                await wait_until(lambda: server.metric("quire:engine_deaths_total") == kills)  # noqa: B023
                await wait_until(lambda: server.metric("quire:engine_responsive") == engines)
                await asyncio.sleep(rng.uniform(0.2, 1.0))
                os.kill(server.engine_pids()[0], signal.SIGKILL)

        await ask_until(asyncio.create_task(kill()), client, expected, 2 * len(KINDS))
        assert server.metric("quire:engine_deaths_total") == KILLS
        assert server.metric("quire:request_replays_total") > 0
        assert server.metric("quire:quarantined_requests_total") == 0
        assert server.stop(signal.SIGTERM) == 0


async def test_killed_api_process_breaks_only_its_own_connections(tmp_path: Path, expected: dict[str, Any]) -> None:
    async with served(tmp_path / "log") as (server, client):
        before = server.api_pids()
        assert await answer(client, LONG) == expected["long"]
        # A process that is asked for metrics asks the others, and the leader keeps their counts then: ask each process
        # once.
        counted = {await asyncio.to_thread(server.metric, "vllm:request_success_total") for _ in range(LOOKS)}
        assert counted == {1.0}
        streams = [asyncio.create_task(answer(client, LONG)) for _ in range(STREAMS)]
        await wait_for_running_requests(server, STREAMS)
        os.kill(before[0], signal.SIGKILL)
        await wait_until(lambda: listeners(server.port) == 1)
        for _ in range(LOOKS):
            assert (await client.get("/v1/models")).status_code == 200, "the other one serves"
        ends = await asyncio.gather(*streams, return_exceptions=True)
        lost = [end for end in ends if isinstance(end, BaseException)]
        assert all(isinstance(end, httpx.TransportError) for end in lost), lost
        assert 0 < len(lost) < STREAMS, "each had some"
        assert [end for end in ends if not isinstance(end, BaseException)] == [expected["long"]] * (STREAMS - len(lost))
        await wait_for_running_requests(server, 0)

        await wait_until(lambda: len(server.api_pids()) == 2)
        (new,) = set(server.api_pids()) - set(before)
        await wait_until(lambda: listens(new))
        os.kill(before[1], signal.SIGSTOP)
        streams = [asyncio.create_task(answer(client, KINDS["greedy"])) for _ in range(STREAMS)]
        done, _ = await asyncio.wait(streams, timeout=120, return_when=asyncio.FIRST_COMPLETED)
        assert all(task.result() == expected["greedy"] for task in done), "the new one serves too"
        os.kill(before[1], signal.SIGCONT)
        assert await asyncio.gather(*streams) == [expected["greedy"]] * STREAMS
        success_count = server.metric("vllm:request_success_total")
        assert success_count == 1 + STREAMS - len(lost) + STREAMS, "one that ended keeps its counts"


@pytest.mark.timeout(400)
async def test_hanging_api_process_is_killed_and_replaced(tmp_path: Path, expected: dict[str, Any]) -> None:
    async with served(tmp_path / "log") as (server, client):
        before = server.api_pids()
        os.kill(before[0], signal.SIGSTOP)
        streams = [asyncio.create_task(answer(client, KINDS["greedy"])) for _ in range(STREAMS)]
        ends = await asyncio.gather(*streams, return_exceptions=True)
        lost = [end for end in ends if isinstance(end, BaseException)]
        assert all(isinstance(end, httpx.TransportError) for end in lost), lost
        assert 0 < len(lost) < STREAMS, "each had some"
        assert [end for end in ends if not isinstance(end, BaseException)] == [expected["greedy"]] * (
            STREAMS - len(lost)
        )
        await wait_until(lambda: len(server.api_pids()) == 2 and before[0] not in server.api_pids())
        (new,) = set(server.api_pids()) - set(before)
        await wait_until(lambda: listens(new))
        assert await answer(client, KINDS["greedy"]) == expected["greedy"]
        assert "sent no heartbeat for " in (tmp_path / "log").read_text()


def listeners(port: int) -> int:
    """Number of sockets that listen on a port. A killed process is a zombie before its last thread closes them."""
    lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()]
    return sum(line[1].endswith(f":{port:04X}") and line[3] == "0A" for line in lines)


def listens(pid: int) -> bool:
    """True if a process has a listening socket."""
    inodes = {line.split()[9] for line in Path("/proc/net/tcp").read_text().splitlines() if line.split()[3] == "0A"}
    links = []
    for each in Path(f"/proc/{pid}/fd").iterdir():
        try:
            links.append(os.readlink(each))
        except OSError:  # closed meanwhile
            continue
    return any(link.removeprefix("socket:[").removesuffix("]") in inodes for link in links)


async def test_every_api_process_sees_and_controls_all_requests(tmp_path: Path) -> None:
    async with served(tmp_path / "log") as (server, client):
        headers = {"X-Request-Id": "mine"}
        pending = asyncio.create_task(client.post(COMPLETIONS, json=LONG | {"max_tokens": 2000}, headers=headers))
        await wait_for_running_requests(server, 1)
        for _ in range(6):
            explanation = (await client.get("/v1/requests/mine/explain")).json()
            assert explanation["state"] == "open", explanation
        for _ in range(6):
            listed = (await client.get("/v1/engine/requests")).json()
            assert listed["tenants"][0]["open"] == 1
        deleted = await client.delete(f"/v1/requests/{explanation['id']}")
        assert deleted.json().get("sequences") == 1, deleted.text
        choice = (await pending).json()["choices"][0]
        assert choice["finish_reason"] == "abort"
        assert (await client.delete(f"/v1/requests/{explanation['id']}")).status_code == 404

        for level in (1, 2):
            assert (await client.post("/sleep", params={"level": level})).json()["is_sleeping"]
            for _ in range(LOOKS):
                assert (await client.get("/is_sleeping")).json()["is_sleeping"]
            assert not (await client.post("/wake_up")).json()["is_sleeping"]

        fingerprints = set()
        await client.post("/update_weights", json={"path": str(DEMO_MODEL), "version": "next"})
        for _ in range(LOOKS):
            completion = (await client.post(COMPLETIONS, json=LONG | {"max_tokens": 1})).json()
            assert completion["weights_version"] == "next"
            fingerprints.add(completion["system_fingerprint"])
        assert len(fingerprints) == 1
        group = {"master_address": "127.0.0.1", "master_port": 1, "rank": 1, "world_size": 2}
        refused = await client.post("/init_weights_group", json=group)
        assert refused.status_code == 400
        assert "--api-server-count" in refused.json()["error"]["message"]


async def test_api_processes_drain_running_streams_on_sigterm(tmp_path: Path, expected: dict[str, Any]) -> None:
    async with served(tmp_path / "log", "--shutdown-timeout", "200") as (server, client):
        streams = [asyncio.create_task(answer(client, LONG)) for _ in range(STREAMS)]
        await wait_for_running_requests(server, STREAMS)
        server.process.send_signal(signal.SIGTERM)
        assert await asyncio.gather(*streams) == [expected["long"]] * STREAMS
        assert await asyncio.to_thread(server.process.wait, 60) == 0


@pytest.mark.parametrize(
    ("options", "models", "flag"),
    [
        ({"enable_lora": True}, None, "--enable-lora"),
        ({"requests_per_minute": 3}, None, "--requests-per-minute"),
        ({"tokens_per_minute": 3}, None, "--tokens-per-minute"),
        ({}, Path("/tmp/x"), "--models"),
    ],
)
def test_settings_with_per_process_state_reject_several_api_processes(
    options: dict[str, Any], models: Path | None, flag: str
) -> None:
    with pytest.raises(ConfigError, match=f"{flag} needs --api-server-count 1, not 2"):
        check_multi_process_settings(ServerConfig(api_server_count=2, **options), models)


def test_api_key_file_with_rate_limits_rejects_several_api_processes(tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    config = ServerConfig(api_server_count=2, api_key_file=keys)
    keys.write_text('[alice]\nkey = "a"\n[bob]\nkey = "b"\nweight = 2.0\n')
    check_multi_process_settings(config, None)
    keys.write_text('[alice]\nkey = "a"\n[bob]\nkey = "b"\ntokens_per_minute = 5\n')
    with pytest.raises(ConfigError, match="--api-key-file with limits a minute needs --api-server-count 1"):
        check_multi_process_settings(config, None)


def test_start_error_of_api_processes_is_printed_once() -> None:
    quire = Path(sys.executable).with_name("quire")
    command = [str(quire), "serve", "--api-server-count", "2", "--port", "0", "--ssl-certfile", "/none.pem"]
    completed = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert completed.returncode == 1
    assert completed.stderr == "quire serve: ssl_certfile: cannot read /none.pem: No such file or directory\n"
