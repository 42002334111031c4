from __future__ import annotations

import logging

from fastapi.middleware.cors import CORSMiddleware
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire.server.config import ServerConfig

REFUSALS_BEFORE_WARNING = 3
"""A single refused preflight may be a probe."""
_MAX_SHOWN_CHARACTERS = 100
log = logging.getLogger("quire.server")


def wrap_in_cors(app: ASGIApp, config: ServerConfig) -> ASGIApp:
    if not config.allowed_origins:
        return PreflightRefusalLogMiddleware(app)
    allowing = CORSMiddleware(
        app,
        allow_origins=config.allowed_origins,
        allow_methods=config.allowed_methods,
        allow_headers=config.allowed_headers,
        allow_credentials=config.allow_credentials,
        expose_headers=["*"],
    )
    return PreflightRefusalLogMiddleware(allowing)


class PreflightRefusalLogMiddleware:
    """Logs the flag's name once: the page's user gets no useful message."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._num_refused = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "OPTIONS":
            return await self._app(scope, receive, send)
        headers = Headers(scope=scope)
        if "access-control-request-method" not in headers or "origin" not in headers:
            return await self._app(scope, receive, send)

        async def send_and_count(message: Message) -> None:
            if message["type"] == "http.response.start" and message["status"] >= 400:
                self._count_refusal_and_warn(headers["origin"][:_MAX_SHOWN_CHARACTERS])
            await send(message)

        await self._app(scope, receive, send_and_count)

    def _count_refusal_and_warn(self, origin: str) -> None:
        self._num_refused += 1
        if self._num_refused == REFUSALS_BEFORE_WARNING:
            log.warning(
                "web pages of %r may not call this server: --allowed-origins lists the origins that may", origin
            )
