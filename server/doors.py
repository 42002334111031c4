"""Who may come in: API keys, before any route sees the request."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from server.errors import error_body

OPEN_PATHS = frozenset({"/health", "/ping", "/ready", "/live"})
"""What load balancers ask, and they have no key."""
PAGE = "/web/"
"""The web page is open: it holds nothing, and asks for a key itself."""


def is_open(path: str) -> bool:
    return path in OPEN_PATHS or path == "/" or path.startswith(PAGE)


class KeyGuard:
    """ASGI middleware that answers 401 without one of the keys, as `Authorization: Bearer KEY`.

    Only hashes of the keys are kept, and all of them are compared, so that the time taken tells nothing. The hash of
    the key that was shown is left in the scope, as `key_hash`.
    """

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self._app = app
        self._hashes = [_hash(key) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or is_open(scope["path"]):
            return await self._app(scope, receive, send)
        scheme, _, key = Headers(scope=scope).get("authorization", "").partition(" ")
        shown = _hash(key.strip())
        known = [hmac.compare_digest(shown, each) for each in self._hashes]
        if scheme.lower() == "bearer" and any(known):
            scope["key_hash"] = shown.hex()
            return await self._app(scope, receive, send)
        message = "Incorrect API key provided" if key else "You didn't provide an API key: Authorization: Bearer KEY"
        body = error_body(message, "authentication_error", None, "invalid_api_key")
        response = Response(body, 401, {"WWW-Authenticate": "Bearer"}, "application/json")
        return await response(scope, receive, send)


def tenant_salt(scope: Scope, cache_salt: str, *, share: bool) -> str:
    """The prefix cache's salt: requests of different keys share no prefixes, so none can time another's prompts."""
    owner = "" if share else scope.get("key_hash", "")
    return f"{owner}/{cache_salt}" if owner else cache_salt


def _hash(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
