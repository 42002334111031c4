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


class Busy:
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


async def asked(app: Busy, left: asyncio.Event | None = None) -> int | None:
    left = left or asyncio.Event()
    answer = await ASGIClient(app, {"tenant": "someone"}, left).post_with_retries("/v1/responses?model=a", b"{}")
    return None if answer is None else answer.status


@pytest.mark.parametrize("busy", [429, 503])
async def test_where_there_is_no_room_it_is_asked_again(busy: int) -> None:
    app = Busy(busy, 200)
    assert await asked(app) == 200
    assert app.asked == 2 * [("/v1/responses", b"model=a", b"{}", "someone")]


@pytest.mark.parametrize("status", [200, 400, 404, 500])
async def test_any_other_answer_is_one(status: int) -> None:
    assert await asked(Busy(status)) == status


async def test_what_says_that_no_other_try_helps_is_an_answer() -> None:
    assert await asked(Busy(429, x_should_retry="false")) == 429


async def test_where_the_application_fails_that_is_an_answer() -> None:
    app = Busy()  # no status is left
    assert await asked(app) == 500


async def test_an_answer_has_its_headers_and_all_of_its_body() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        async def pieces() -> AsyncIterator[bytes]:
            yield b"one, "
            yield b"two"

        await StreamingResponse(pieces(), headers={"X-Request-Id": "r1"})(scope, receive, send)

    answer = await ASGIClient(app, {}, asyncio.Event()).post_with_retries("/v1/responses", b"{}")
    assert answer is not None
    assert (answer.status, answer.headers["x-request-id"], answer.body) == (200, "r1", b"one, two")


async def test_who_leaves_has_no_answer_but_one_that_is_there() -> None:
    left = asyncio.Event()
    assert await asked(Busy(503, left=left), left) is None
    assert await asked(Busy(), left) is None, "nothing is asked any more"
    left = asyncio.Event()
    assert await asked(Busy(200, left=left), left) == 200


async def test_a_server_s_own_calls_pass_its_check_of_hosts() -> None:
    hosts = AllowedHosts(ServerConfig())
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        hosts.enforce_if_loopback_only([listener])
    app = AllowedHostsMiddleware(Busy(200), hosts)
    answer = await ASGIClient(app, {"tenant": "someone"}, asyncio.Event()).post_with_retries("/v1/responses", b"{}")
    assert answer is not None
    assert answer.status == 200
