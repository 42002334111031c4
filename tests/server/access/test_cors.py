"""Requests that are no browser's preflight pass the CORS middleware."""

from __future__ import annotations

import logging

import pytest
from starlette.types import Message, Receive, Scope, Send

from quire.server.access.cors import REFUSALS_BEFORE_WARNING, wrap_in_cors
from quire.server.config import ServerConfig


async def test_cors_passes_lifespan_on_when_the_server_starts() -> None:
    seen = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        seen.append(scope["type"])

    for origins in ([], ["https://a.example"]):
        await wrap_in_cors(app, ServerConfig(allowed_origins=origins))({"type": "lifespan"}, no_messages, ignore)
    assert seen == ["lifespan", "lifespan"]


@pytest.mark.parametrize("method", ["OPTIONS", "GET"])
async def test_cors_warns_of_refusals_when_they_are_preflights(method: str, caplog: pytest.LogCaptureFixture) -> None:
    async def refuse(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 405, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    headers = [(b"origin", b"https://a.example"), (b"access-control-request-method", b"POST")]
    app = wrap_in_cors(refuse, ServerConfig())
    with caplog.at_level(logging.WARNING, "quire.server"):
        for _ in range(REFUSALS_BEFORE_WARNING):
            await app({"type": "http", "method": method, "path": "/", "headers": headers}, no_messages, ignore)
    assert ("--allowed-origins" in caplog.text) == (method == "OPTIONS")


async def no_messages() -> Message:
    raise AssertionError


async def ignore(message: Message) -> None:
    pass
