"""GET / and /web/…: the files of the playground and the dashboard."""

from __future__ import annotations

from pathlib import Path

from fastapi import APIRouter
from starlette.responses import Response
from starlette.routing import Mount
from starlette.staticfiles import StaticFiles
from starlette.types import Scope

FOLDER = Path(__file__).resolve().parent.parent / "web"
HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "font-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'",
    "cross-origin-opener-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "cache-control": "no-cache",  # a browser asks each time whether the file has changed, which costs one short answer
}


class WebFiles(StaticFiles):
    """Serves files with headers that let them talk to no server but this one."""

    async def get_response(self, path: str, scope: Scope) -> Response:
        response = await super().get_response(path, scope)
        response.headers.update(HEADERS)
        return response


files = WebFiles(directory=FOLDER)
router = APIRouter(routes=[Mount("/web", files)])


@router.get("/", include_in_schema=False)
async def page() -> Response:
    """The page. It needs no key, because it holds no data."""
    return await files.get_response("index.html", {"type": "http", "method": "GET", "headers": []})
