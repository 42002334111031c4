"""Requests that the server makes to itself in the name of a tenant, without a socket."""

from __future__ import annotations

import asyncio

import httpx
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire.server.access.gateways import PRIORITY
from quire.server.access.tenants import Tenant

BEHIND = 1 << 20
"""The priority of batches: whatever comes with a smaller number, 0 unless it says otherwise, goes first."""


def client_for(app: ASGIApp, tenant: Tenant, left: asyncio.Event) -> httpx.AsyncClient:
    """A client of the application. Once `left` is set, its requests end as if their caller had left."""
    transport = httpx.ASGITransport(_named(app, tenant, left), raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://batch", timeout=None, trust_env=False)


def _named(app: ASGIApp, tenant: Tenant, left: asyncio.Event) -> ASGIApp:
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

        await app({**scope, "tenant": tenant, PRIORITY: BEHIND}, receive_or_leave, send)

    return ask
