"""Requests that the server makes to itself in the name of a tenant, without a socket."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import httpx
from starlette.types import ASGIApp, Message, Receive, Scope, Send


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
