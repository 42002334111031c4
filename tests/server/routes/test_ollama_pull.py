"""POST /api/pull, with a stand-in for the hub."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.server.api import Api, open_api
from tests.server.fake import FakeEngine, hashed
from tests.stand_in_hub import Repo, stand_in_hub, tiny_gguf


async def test_pull_is_rejected_without_allow_pull(api: Api) -> None:
    answer = await api.http.post("/api/pull", json={"model": "own/m"})
    assert (answer.status_code, "--allow-pull" in answer.json()["error"]) == (400, True)


async def test_pull_requires_admin_key_and_valid_body() -> None:
    options = {"allow_pull": True, "api_key": ["sk-user"], "admin_api_key": ["sk-admin"]}
    async with open_api(FakeEngine(hashed(b"a")), **options) as api:
        request = {"json": {"model": "own/m"}}
        refused = await api.http.post("/api/pull", **request, headers={"x-api-key": "sk-user"})
        assert refused.status_code == 403
        for body in ({}, {"model": "--revision"}, {"model": "x" * 70_000}):
            answer = await api.http.post("/api/pull", json=body, headers={"x-api-key": "sk-admin"})
            assert answer.status_code == (200 if body == {"model": "--revision"} else 400)
            if answer.status_code == 200:
                assert "error" in json.loads(answer.text.splitlines()[-1]), "a name, and no flag"


@pytest.mark.slow
async def test_pull_downloads_model_and_reports_errors(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with stand_in_hub() as hub:
        hub.repos["own/g"] = Repo({"g-Q8_0.gguf": tiny_gguf("Q8_0")})
        for name, value in (("HF_ENDPOINT", hub.url), ("HF_HUB_CACHE", str(tmp_path)), ("HF_HUB_DISABLE_XET", "1")):
            monkeypatch.setenv(name, value)
        async with open_api(FakeEngine(hashed(b"a")), allow_pull=True) as api:
            answer = await api.http.post("/api/pull", json={"name": "own/g:Q8_0"}, timeout=60)
            lines = [json.loads(line) for line in answer.text.splitlines()]
            assert (lines[0], lines[-1]) == ({"status": "pulling manifest"}, {"status": "success"})
            whole = await api.http.post("/api/pull", json={"model": "own/none", "stream": False}, timeout=60)
            assert (whole.status_code, "own/none" in whole.json()["error"]) == (400, True)
    assert [*tmp_path.glob("models--own--g/snapshots/*/g-Q8_0.gguf")]  # noqa: ASYNC240
