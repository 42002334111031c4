"""Web pages. The API description uses Swagger UI 5.35, which the package includes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from fastapi import APIRouter
from starlette.responses import Response
from starlette.routing import Mount
from starlette.staticfiles import StaticFiles
from starlette.types import Scope

WEB_FOLDER = Path(__file__).resolve().parent.parent / "web"
WEB_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "font-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'",
    "cross-origin-opener-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "cache-control": "no-cache",  # browsers ask each time for changes
}
API_DOCS_HEADERS = WEB_HEADERS | {
    # Swagger UI writes styles and markup into its elements, but calls only this server.
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
}


class WebFiles(StaticFiles):
    def __init__(self, folder: Path, headers: Mapping[str, str]) -> None:
        super().__init__(directory=folder)
        self._headers = headers

    async def get_response(self, path: str, scope: Scope) -> Response:
        response = await super().get_response(path, scope)
        response.headers.update(self._headers)
        return response


web_files, api_docs_files = (
    WebFiles(WEB_FOLDER, WEB_HEADERS),
    WebFiles(WEB_FOLDER.parent / "api_docs", API_DOCS_HEADERS),
)
router = APIRouter(routes=[Mount("/web", web_files), Mount("/docs/", api_docs_files)])


@router.get("/", include_in_schema=False)
async def index_page() -> Response:
    """The page needs no key, because it contains no data."""
    return await web_files.get_response("index.html", {"type": "http", "method": "GET", "headers": []})


@router.get("/docs", include_in_schema=False)
async def api_docs_page() -> Response:
    return await api_docs_files.get_response("index.html", {"type": "http", "method": "GET", "headers": []})
