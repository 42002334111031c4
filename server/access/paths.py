"""Paths that need no key, and those that need an admin's."""

from __future__ import annotations

from starlette.responses import RedirectResponse
from starlette.types import ASGIApp, Receive, Scope, Send

OPEN_PATHS = frozenset({"/health", "/ping", "/ready", "/live"})
"""Paths that need no key, because load balancers request them and have none."""
PAGE = "/web/"
"""The web page's files need no key: they contain nothing secret, and the page asks its user for a key."""
ADMIN_PREFIX = "/v1/engine/"
"""Routes for the server's operators: on a server with keys they need an admin's."""

ADMIN_PATHS = frozenset(
    {
        *("/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/v1/models/load", "/v1/models/unload"),
        *("/sleep", "/wake_up", "/is_sleeping"),
        *("/update_weights", "/init_weights_group", "/close_weights_group", "/api/pull"),
        "/collective_rpc",
    }
)
"""More of these."""
LOCAL_PATHS = ADMIN_PATHS - {"/is_sleeping"}
"""Those of them that on a server without keys are this machine's alone, and no web page's."""


class PrefixMiddleware:
    """Takes --root-path off the paths of requests, so that all that follows knows one path for each route.

    Whether a path is an admin's is decided by that path: it must be the one that is routed. So the scope's `root_path`,
    which Starlette would take off once more, is set for the API's description alone.
    """

    def __init__(self, app: ASGIApp, prefix: str) -> None:
        self._app, self._prefix = app, prefix.rstrip("/")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "")
        if path == self._prefix:
            return await RedirectResponse(f"{self._prefix}/")(scope, receive, send)
        if path.startswith(f"{self._prefix}/"):
            path = path[len(self._prefix) :]
            scope = {**scope, "path": path, "raw_path": scope.get("raw_path", b"")[len(self._prefix) :]}
        if path == "/openapi.json":
            scope = {**scope, "root_path": self._prefix}
        await self._app(scope, receive, send)


def is_open(path: str) -> bool:
    return path in OPEN_PATHS or path == "/" or path.startswith(PAGE)
