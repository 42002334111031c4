from __future__ import annotations

import logging
from collections.abc import Sequence

from fastapi.middleware.cors import CORSMiddleware
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire.server.config import ServerConfig
from quire.server.error_responses import ErrorInfo, error_response

REFUSALS_BEFORE_WARNING = 3
"""A single refused preflight may be a probe."""
_MAX_SHOWN_CHARACTERS = 100
log = logging.getLogger("quire.server")


def wrap_in_cors(app: ASGIApp, config: ServerConfig) -> ASGIApp:
    app = WebSocketOriginMiddleware(app, config.allowed_origins)
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


class WebSocketOriginMiddleware:
    """Browsers do not apply CORS to WebSockets."""

    def __init__(self, app: ASGIApp, allowed_origins: Sequence[str]) -> None:
        self._app = app
        self._allowed_origins = allowed_origins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "websocket" or self._is_allowed(Headers(scope=scope)):
            return await self._app(scope, receive, send)
        message = "Web pages of this origin may not open WebSockets to this server: see --allowed-origins"
        failure = ErrorInfo(403, message, "permission_error", None, "origin_not_allowed")
        await error_response(scope["path"], failure)(scope, receive, send)

    def _is_allowed(self, headers: Headers) -> bool:
        """Accepts requests without an origin, because these come from programs. The origin's scheme is ignored, because
        proxies may change it.
        """
        if "*" in self._allowed_origins:
            return True
        same_host_suffix = f"://{headers.get('host', '').lower()}"
        return all(
            origin in self._allowed_origins or origin.lower().endswith(same_host_suffix)
            for origin in headers.getlist("origin")
        )


class PreflightRefusalLogMiddleware:
    """Logs once that --allowed-origins exists, because the user of the web page gets no useful message."""

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
