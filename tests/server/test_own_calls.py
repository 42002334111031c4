"""Calls that the server sends to itself, for batches and background responses: retried until there is capacity."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from quire.server.access.allowed_hosts import AllowedHosts, AllowedHostsMiddleware
from quire.server.batches.asgi_client import ASGIClient
from quire.server.config import ServerConfig


class BusyApp:
    """An application that answers with these statuses in turn."""

    def __init__(self, *statuses: int, left: asyncio.Event | None = None, **headers: str) -> None:
        self._statuses = list(statuses)
        self._left = left
        self._headers = headers
        self.asked: list[Any] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.asked.append((scope["path"], scope["query_string"], (await receive())["body"], scope["tenant"]))
        if self._left is not None:
            self._left.set()
        names = {name.replace("_", "-"): value for name, value in self._headers.items()}
        await Response(status_code=self._statuses.pop(0), headers=names)(scope, receive, send)


async def post_and_get_status(app: BusyApp, left: asyncio.Event | None = None) -> int | None:
    left = left or asyncio.Event()
    answer = await ASGIClient(app, {"tenant": "someone"}, left).post_with_retries("/v1/responses?model=a", b"{}")
    return None if answer is None else answer.status


@pytest.mark.parametrize("busy", [429, 503])
async def test_internal_call_is_retried_when_server_is_busy(busy: int) -> None:
    app = BusyApp(busy, 200)
    assert await post_and_get_status(app) == 200
    assert app.asked == 2 * [("/v1/responses", b"model=a", b"{}", "someone")]


@pytest.mark.parametrize("status", [200, 400, 404, 500])
async def test_internal_call_returns_other_statuses_without_retry(status: int) -> None:
    assert await post_and_get_status(BusyApp(status)) == status


async def test_should_retry_false_stops_retries() -> None:
    assert await post_and_get_status(BusyApp(429, x_should_retry="false")) == 429


async def test_application_exception_returns_500() -> None:
    app = BusyApp()  # no status is left
    assert await post_and_get_status(app) == 500


async def test_internal_call_returns_headers_and_whole_streamed_body() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        async def pieces() -> AsyncIterator[bytes]:
            yield b"one, "
            yield b"two"

        await StreamingResponse(pieces(), headers={"X-Request-Id": "r1"})(scope, receive, send)

    answer = await ASGIClient(app, {}, asyncio.Event()).post_with_retries("/v1/responses", b"{}")
    assert answer is not None
    assert (answer.status, answer.headers["x-request-id"], answer.body) == (200, "r1", b"one, two")


async def test_cancelled_internal_call_returns_only_finished_answer() -> None:
    left = asyncio.Event()
    assert await post_and_get_status(BusyApp(503, left=left), left) is None
    assert await post_and_get_status(BusyApp(), left) is None, "nothing is asked any more"
    left = asyncio.Event()
    assert await post_and_get_status(BusyApp(200, left=left), left) == 200


async def test_internal_calls_pass_allowed_hosts_check() -> None:
    hosts = AllowedHosts(ServerConfig())
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        hosts.enforce_if_loopback_only([listener])
    app = AllowedHostsMiddleware(BusyApp(200), hosts)
    answer = await ASGIClient(app, {"tenant": "someone"}, asyncio.Event()).post_with_retries("/v1/responses", b"{}")
    assert answer is not None
    assert answer.status == 200
