"""The web page's files: complete, from this server alone, and open to callers without a key."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from quire.server.routes.web_pages import WEB_FOLDER
from tests.server.api import Api, open_api
from tests.server.fake import FakeEngine, hashed

FILES = sorted(path for path in WEB_FOLDER.rglob("*") if path.is_file())


async def test_web_files_have_strict_content_security_policy(api: Api) -> None:
    for url in ["/", *(f"/web/{path.relative_to(WEB_FOLDER)}" for path in FILES)]:
        answer = await api.http.get(url)
        assert answer.status_code == 200, url
        policy = answer.headers["content-security-policy"]
        assert policy.startswith("default-src 'none'; script-src 'self';"), url
        assert "unsafe" not in policy
        assert answer.headers["x-content-type-options"] == "nosniff"
    home = await api.http.get("/")
    assert home.headers["content-type"].startswith("text/html")
    script = await api.http.get("/web/js/app.js")
    assert "javascript" in script.headers["content-type"]
    unchanged = await api.http.get("/web/js/app.js", headers={"If-None-Match": script.headers["etag"]})
    assert unchanged.status_code == 304


@pytest.mark.parametrize("path", [path for path in FILES if path.suffix in (".html", ".css", ".js", ".svg")], ids=str)
def test_web_files_load_nothing_external(path: Path) -> None:
    text = path.read_text(encoding="utf-8").replace("http://www.w3.org/2000/svg", "")
    loads = re.findall(r"""(?:src|href)="([^"]*)"|(?<!\w)url\(["']?([^"')]+)|import[^;]*?from "([^"]+)\"""", text)
    for place in (found for groups in loads for found in groups if found):
        assert place.startswith(("/web/", "./", "../", "#")), place
    for unsafe in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval("):
        assert unsafe not in text, unsafe


async def test_page_needs_no_key_but_api_does() -> None:
    async with open_api(FakeEngine(hashed(b"abc")), api_key=["secret"]) as api:
        for url in ("/", "/web/js/app.js", "/web/css/base.css"):
            assert (await api.http.get(url)).status_code == 200, url
        for url in ("/v1/models", "/v1/engine/events", "/web", "/webs", "/web/../v1/models"):
            assert (await api.http.get(url)).status_code in (401, 404), url
        assert (await api.http.delete("/v1/requests/x")).status_code == 401


async def test_files_outside_web_folder_return_404(api: Api) -> None:
    for url in ("/web/../app.py", "/web/..%2fapp.py", "/web/%2e%2e/app.py", "/web/", "/web/js", "/web/nothing.js"):
        answer = await api.http.get(url)
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "unknown_url"), url


async def test_api_docs_page_loads_only_packaged_files(api: Api) -> None:
    page = await api.http.get("/docs")
    assert page.status_code == 200
    places = re.findall(r'(?:src|href)="([^"]*)"', page.text)
    assert len(places) == 4
    for place in places:
        answer = await api.http.get(place)
        assert answer.status_code == 200, place
        assert len(answer.content) > 100
    assert "default-src 'none'; script-src 'self';" in page.headers["content-security-policy"]
    assert (await api.http.get("/redoc")).status_code == 404
    assert (await api.http.get("/openapi.json")).json()["info"]["title"] == "Quire"
