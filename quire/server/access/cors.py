"""Which web pages of other origins may call the server; and a hint to the operator if pages are refused."""

from __future__ import annotations

import logging

from fastapi.middleware.cors import CORSMiddleware
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire.server.config import ServerConfig

REFUSALS_BEFORE_WARNING = 3
"""Preflights that were refused, until the log says so: one alone may be anybody's who looks around."""
_MAX_SHOWN_CHARACTERS = 100
log = logging.getLogger("quire.server")


def wrap_in_cors(app: ASGIApp, config: ServerConfig) -> ASGIApp:
    """An application that web pages of config.allowed_origins may call."""
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
    """Logs the name of the flag, once, when browsers repeatedly ask whether a page may call the server and it may not.
    The page itself gets no message that its user could understand."""

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
            log.warning("web pages of %r may not call this server: --allowed-origins names those that may", origin)
