"""Authentication by API keys, before any route sees the request."""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from quire.server.access.tenants import Tenant, Tenants
from quire.server.errors import error_body

OPEN_PATHS = frozenset({"/health", "/ping", "/ready", "/live"})
"""Load balancers ask for these without a key."""
PAGE = "/web/"
"""The web page needs no key: it holds no data, and asks its user for a key."""
ADMIN_PREFIX = "/v1/engine/"
"""Routes for the server's operators: where keys are needed, only an admin's key opens them."""


def is_open(path: str) -> bool:
    return path in OPEN_PATHS or path == "/" or path.startswith(PAGE)


class AuthenticationMiddleware:
    """ASGI middleware that answers 401 to requests without a valid `Authorization: Bearer KEY`.

    It puts the key's owner into the scope as `tenant`: see `tenant_of`.
    """

    def __init__(self, app: ASGIApp, tenants: Tenants) -> None:
        self._app = app
        self._tenants = tenants

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            return await self._app(scope, receive, send)
        if scope["type"] != "http":
            return await send({"type": "websocket.close", "code": 1008})
        if not self._tenants.closed or is_open(scope["path"]):
            scope["tenant"] = self._tenants.anybody
            return await self._app(scope, receive, send)
        scheme, _, key = Headers(scope=scope).get("authorization", "").partition(" ")
        tenant = self._tenants.find(key.strip())
        if scheme.lower() != "bearer" or tenant is None:
            missing = "You didn't provide an API key: Authorization: Bearer KEY"
            message = "Incorrect API key provided" if key else missing
            refusal = _refusal(401, message, "authentication_error", "invalid_api_key")
        elif scope["path"].startswith(ADMIN_PREFIX) and not tenant.admin:
            message = "This route needs an admin's API key: see --admin-api-key"
            refusal = _refusal(403, message, "permission_error", "admin_key_needed")
        else:
            scope["tenant"] = tenant
            return await self._app(scope, receive, send)
        return await refusal(scope, receive, send)


def tenant_of(scope: Scope) -> Tenant:
    """The tenant whose key the request showed."""
    tenant = scope["tenant"]
    assert isinstance(tenant, Tenant)
    return tenant


def _refusal(status: int, message: str, kind: str, code: str) -> Response:
    headers = {"WWW-Authenticate": "Bearer"} if status == 401 else {}
    return Response(error_body(message, kind, None, code), status, headers, "application/json")
