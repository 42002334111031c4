"""Each kind of process of a server is stopped (SIGSTOP) while requests of every kind run and arrive: every request ends
within seconds, with the right answer or, if only the stopped process had it, with a clear error.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from quire.kernels.cpu.backend import CpuBackend
from tests.e2e.server import Server, children
from tests.e2e.streams import KINDS, answer

MISSING = CpuBackend().missing_reason
pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")]
SECONDS = 30.0
"""Every request ends within this time, or half of it if the machine is idle enough to start an engine soon."""
HEARTBEAT = 4.0
"""Seconds after which an engine or a rank is replaced."""
WORKER, FOLLOWER = b"quire.server.workers.worker", b"quire.engine.worker.ranks.follower"
TEXT = "The fox and the crow. " * 5000
"""A body so large that only body workers read it."""


def forkers(server: Server) -> list[int]:
    return children(server.process.pid, WORKER)


def workers(server: Server) -> list[int]:
    return [pid for forker in forkers(server) for pid in children(forker, WORKER)]


def ranks(server: Server) -> list[int]:
    return [pid for engine in server.engine_pids() for pid in children(engine, FOLLOWER)]


@dataclass(frozen=True)
class Kind:
    """A kind of process."""

    find: Callable[[Server], list[int]]
    flags: tuple[str, ...] = ()
    refuses: tuple[str, ...] = ()
    """Requests that may be answered with 503."""
    breaks: bool = False
    """True if connections may break."""
    kill: Callable[[Server], list[int]] | None = None
    """Finds idle processes that are killed before the requests, so that the stopped process has work to do."""


PROCESSES = {
    "worker": Kind(workers, refuses=("tokenize",)),
    "forker": Kind(forkers, kill=workers),
    "engine": Kind(Server.engine_pids),
    "rank": Kind(ranks, ("--tensor-parallel-size", "2")),
    "stage": Kind(ranks, ("--pipeline-parallel-size", "2")),
    "replica": Kind(Server.engine_pids, ("--data-parallel-size", "2")),
    "api process": Kind(Server.api_pids, ("--api-server-count", "2"), breaks=True),
}


async def post_and_pick_fields(client: httpx.AsyncClient, path: str, body: dict[str, Any], *fields: str) -> Any:
    response = await client.post(path, json=body)
    if response.status_code == 503:
        assert response.headers["Retry-After"]
        raise Refused(response.json()["error"]["message"])
    assert response.status_code == 200, response.text
    return [response.json()[field] for field in fields]


class Refused(Exception):
    """The server answered 503."""


ASKS: dict[str, Callable[[httpx.AsyncClient], Any]] = {
    "chat": lambda client: answer(client, KINDS["chat"]),
    "completion": lambda client: answer(client, KINDS["seeded"] | {"max_tokens": 400, "ignore_eos": True}),
    "responses": lambda client: post_response(client),
    "tokenize": lambda client: post_and_pick_fields(client, "/tokenize", {"prompt": TEXT}, "tokens"),
}


async def post_response(client: httpx.AsyncClient) -> Any:
    body = {"input": "Tell me of a crow.", "temperature": 0, "max_output_tokens": 60}
    (output,) = await post_and_pick_fields(client, "/v1/responses", body, "output")
    return [part["text"] for item in output for part in item["content"]]


@pytest.mark.parametrize("name", PROCESSES)
async def test_every_request_ends_while_one_process_is_stopped(name: str, tmp_path: Path) -> None:
    kind = PROCESSES[name]
    if name in ("rank", "stage") and MISSING is not None:
        pytest.skip(MISSING)
    flags = ("--threads", "2", "--engine-heartbeat-timeout", str(HEARTBEAT), *kind.flags)
    with Server(tmp_path / "log", *flags) as server:
        # Every request opens its own connection, so that each API process gets some.
        limits = httpx.Limits(max_keepalive_connections=0, max_connections=None)
        async with httpx.AsyncClient(base_url=server.url, timeout=60, limits=limits) as client:
            expected = {what: await ask(client) for what, ask in ASKS.items()}
            before = [asyncio.create_task(answer_or_error(client, what)) for what in ASKS for _ in range(4)]
            if kind.kill is None:
                await asyncio.sleep(0.1)
            for pid in () if kind.kill is None else kind.kill(server):
                os.kill(pid, signal.SIGKILL)
            os.kill(kind.find(server)[0], signal.SIGSTOP)
            after = [asyncio.create_task(answer_or_error(client, what)) for what in ASKS for _ in range(4)]
            outcomes = await asyncio.gather(*before, *after)
            bad = [(what, end) for what, end in outcomes if end != expected[what] and not allowed(kind, what, end)]
            assert not bad, bad
            for what in ASKS:
                while isinstance(end := (await answer_or_error(client, what))[1], httpx.TransportError):
                    assert kind.breaks
                assert end == expected[what], "another process has taken its place"
            assert server.process.poll() is None
            assert server.metric("quire:quarantined_requests_total") == 0


async def test_api_processes_return_503_and_errors_while_leader_is_stopped(tmp_path: Path) -> None:
    with Server(tmp_path / "log", "--threads", "2", "--api-server-count", "2") as server:
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
            expected = {what: await ask(client) for what, ask in ASKS.items()}
            os.kill(server.process.pid, signal.SIGSTOP)
            outcomes = await asyncio.gather(*[answer_or_error(client, "completion") for _ in range(4)])
            for _, end in outcomes:  # before a stream has begun, or within it
                assert isinstance(end, AssertionError), end
                assert "no heartbeat" in str(end)
            assert (await client.get("/health")).status_code == 503
            os.kill(server.process.pid, signal.SIGCONT)
            while (await client.get("/health")).status_code != 200:  # noqa: ASYNC110
                await asyncio.sleep(0.1)
            assert {what: await ask(client) for what, ask in ASKS.items()} == expected


async def test_sigusr1_logs_thread_stacks_and_ends_no_process(tmp_path: Path) -> None:
    with Server(tmp_path / "log", "--threads", "2") as server:
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
            await ASKS["tokenize"](client)
            pids = [server.process.pid, *server.engine_pids(), *forkers(server), *workers(server)]
            assert len(pids) == 4
            for pid in pids:
                os.kill(pid, signal.SIGUSR1)
            for ask in ASKS.values():
                await ask(client)
        assert pids == [server.process.pid, *server.engine_pids(), *forkers(server), *workers(server)]
        written = server.log.read_text()
        assert all(f'{name}", line' in written for name in ("serve.py", "engine_core_process.py", "worker.py"))


async def answer_or_error(client: httpx.AsyncClient, what: str) -> tuple[str, Any]:
    """Return the request's kind and its answer or error. Fails if there is neither in time."""
    try:
        async with asyncio.timeout(SECONDS):
            return what, await ASKS[what](client)
    except (httpx.TransportError, Refused, TimeoutError, AssertionError) as error:
        return what, error


def allowed(kind: Kind, what: str, end: Any) -> bool:
    if isinstance(end, Refused):
        return what in kind.refuses
    return kind.breaks and isinstance(end, httpx.TransportError)
