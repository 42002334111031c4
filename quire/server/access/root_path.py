from __future__ import annotations

from starlette.responses import RedirectResponse
from starlette.types import ASGIApp, Receive, Scope, Send


class RootPathMiddleware:
    """Removes --root-path from the beginning of paths, so that rules for paths, such as those for admins, apply. Sets
    `root_path` only for the API description, because for other routes Starlette would remove it from the path again.
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
