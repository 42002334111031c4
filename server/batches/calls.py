"""Requests that the server makes to itself in the name of a tenant, without a socket."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from http import HTTPStatus
from typing import Any

import httpx
from starlette.types import ASGIApp, Message, Receive, Scope, Send

_LATER = (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE)
_LONGEST_WAIT = 30.0
"""Seconds between two tries of a request for which there was no room."""


def client_for(app: ASGIApp, more: Mapping[str, Any], left: asyncio.Event) -> httpx.AsyncClient:
    """A client of the application. `more`: what the scopes of its requests have beside their own, the `tenant` above
    all. Once `left` is set, they end as if their caller had left."""
    transport = httpx.ASGITransport(_with(app, more, left), raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://batch", timeout=None, trust_env=False)


def _with(app: ASGIApp, more: Mapping[str, Any], left: asyncio.Event) -> ASGIApp:
    async def ask(scope: Scope, receive: Receive, send: Send) -> None:
        whole = False

        async def receive_or_leave() -> Message:
            nonlocal whole
            if whole:
                await left.wait()
                return {"type": "http.disconnect"}
            message = await receive()
            whole = not message.get("more_body")
            return message

        await app({**scope, **more}, receive_or_leave, send)

    return ask


async def answer_to(client: httpx.AsyncClient, path: str, body: bytes, left: asyncio.Event) -> httpx.Response | None:
    """The answer to a POST, once there is room for it; None where `left` was set before."""
    wait = 0.25
    while not left.is_set():
        answer = await client.post(path, content=body, headers={"Content-Type": "application/json"})
        if left.is_set() and answer.status_code != HTTPStatus.OK:
            return None
        if answer.status_code not in _LATER or answer.headers.get("x-should-retry") == "false":
            return answer
        with suppress(TimeoutError):
            await asyncio.wait_for(left.wait(), wait)
        wait = min(2 * wait, _LONGEST_WAIT)
    return None
