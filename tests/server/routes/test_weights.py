"""Routes that change weights, on a fake engine; tests/engine/test_weights.py tests what engines do."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from quire.engine.common.errors import ConfigError
from tests.server.api import Api, make_app, open_api, open_http
from tests.server.fake import FakeEngine, scripted

EOS = 258
HELLO = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 5}
ANSWERS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "hello", "max_tokens": 5, "n": 2},
    "/v1/chat/completions": HELLO,
    "/v1/messages": HELLO | {"model": "second"},
    "/v1/responses": {"input": "hello"},
}
"""By path, a body that is answered whole or streamed."""
ROUTES: dict[str, Any] = {"/sleep": {}, "/wake_up": {}, "/update_weights": {"path": "/"}, "/close_weights_group": {}}


class RecordingEngine(FakeEngine):
    """Records the calls it gets. The next change raises `refusal`."""

    def __init__(self) -> None:
        super().__init__(scripted(b"abcde" * 20, EOS), eos=[EOS], step_seconds=0.002)
        self.changes: list[tuple[str, object]] = []
        self.refusal: Exception | None = None

    async def rest(self, level: int) -> None:
        self.changes.append(("rest", level))
        await super().rest(level)

    async def load(self, weights: str | None, version: str) -> None:
        self.changes.append(("load", weights))
        await asyncio.sleep(0)
        if self.refusal is not None:
            raise self.refusal
        await super().load(weights, version)

    @property
    def responsive(self) -> bool:
        return not self.asleep

    @property
    def healthy(self) -> bool:
        return True


@pytest.fixture(scope="module")
async def unchanged_api() -> AsyncIterator[Api]:
    """For requests that are rejected."""
    engine = RecordingEngine()
    async with open_api(engine) as api:
        yield api
        assert engine.changes == []


async def get_status(api: Api, path: str) -> int:
    return (await api.http.get(path)).status_code


async def test_sleep_and_wake_up_report_state_and_readiness() -> None:
    engine = RecordingEngine()
    async with open_api(engine) as api:
        assert await api.post("/sleep?level=2", None) == {"is_sleeping": True, "weights_version": "1"}
        assert engine.changes == [("rest", 2)]
        assert (await api.http.get("/is_sleeping")).json()["is_sleeping"] is True
        assert [await get_status(api, path) for path in ("/health", "/ping", "/live", "/ready")] == [200, 200, 200, 503]
        assert "quire:engine_asleep{" in (metrics := (await api.http.get("/metrics")).text)
        assert any(line.startswith("quire:engine_asleep{") and line.endswith(" 1.0") for line in metrics.splitlines())
        assert await get_status(api, "/v1/models") == 200
        late = await api.post("/v1/completions", {"prompt": "x", "queue_timeout": 0.05}, 503)
        assert late["error"]["code"] == "queue_timeout"
        response = await api.http.post("/wake_up?tags=weights&tags=kv_cache")
        assert response.json()["is_sleeping"] is False
        assert response.headers["x-ignored-params"] == "tags"
        assert await get_status(api, "/ready") == 200


async def test_sleep_with_refuse_rejects_new_requests() -> None:
    engine = RecordingEngine()
    async with open_api(engine) as api:
        await api.post("/sleep?refuse=true", None)
        refused = await api.post("/v1/completions", {"prompt": "x"}, 503)
        assert "The model is asleep" in refused["error"]["message"]
        await api.post("/sleep?refuse=false", None)
        assert engine.changes == [("rest", 1)], "it slept already"
        late = await api.post("/v1/completions", {"prompt": "x", "queue_timeout": 0.05}, 503)
        assert late["error"]["code"] == "queue_timeout"
        await api.post("/wake_up", None)
        await api.post("/v1/completions", {"prompt": "x"})


async def test_failed_wake_up_leaves_model_asleep() -> None:
    engine = RecordingEngine()
    async with open_api(engine) as api:
        await api.post("/sleep", None)
        engine.refusal = ConfigError("no room")
        assert "no room" in (await api.post("/wake_up", None, 503))["error"]["message"]
        assert engine.asleep
        engine.refusal = None
        await api.post("/wake_up", None)
        assert not engine.asleep


@pytest.mark.few(1)
@pytest.mark.parametrize("path", ANSWERS)
async def test_every_answer_reports_weights_version(path: str, tmp_path: Path) -> None:
    engine = RecordingEngine()
    async with open_api(engine) as api:
        prints = []
        for version, body in (("1", None), ("2", {}), ("step-9", {"version": "step-9", "mode": "wait"})):
            if body is not None:
                response = await api.post("/update_weights", {"path": str(tmp_path), **body})
                assert response == {"is_sleeping": False, "weights_version": version}
            whole = await api.http.post(path, json=ANSWERS[path])
            assert whole.json()["weights_version"] == version, whole.text
            assert whole.headers["x-weights-version"] == version
            prints.append(whole.json().get("system_fingerprint", version))
            streamed = await api.http.post(path, json=ANSWERS[path] | {"stream": True})
            assert streamed.headers["x-weights-version"] == version
            assert f'"weights_version":"{version}"' in streamed.text
        assert len(set(prints)) == 3
        assert engine.changes == [("load", str(tmp_path))] * 2


async def test_stream_across_update_ends_with_new_weights_version(tmp_path: Path) -> None:
    engine = RecordingEngine()
    async with open_api(engine) as api:
        body = {"prompt": "x", "max_tokens": 60}
        streaming = asyncio.create_task(api.events("/v1/completions", body))
        await engine.sent.wait()
        await api.post("/update_weights", {"path": str(tmp_path)})
        events = await streaming
        assert [event["weights_version"] for event in events if event["choices"][0]["finish_reason"]] == ["2"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "path"),
        ({"path": 5}, "path"),
        ({"path": ""}, "path"),
        ({"path": "/nowhere/at/all"}, "path"),
        ({"path": "a\0b"}, "path"),
        ({"path": "/", "mode": "later"}, "mode"),
        ({"path": "/", "version": "two words"}, "version"),
        ({"path": "/", "version": "line\r\nbreak"}, "version"),
        ({"path": "/", "version": ""}, "version"),
        ({"path": "/", "tensors": [{"name": "a", "dtype": "float32", "shape": [1]}]}, "path"),
        ({"tensors": [{"name": "a", "dtype": "float32", "shape": [1]}]}, "tensors"),
        ({"tensors": [{"name": "a", "dtype": "float32", "shape": [2**31] * 8}]}, "tensors"),
        ({"tensors": []}, "tensors"),
        ({"tensors": [{"name": "a", "dtype": "int8", "shape": [1]}]}, "tensors"),
        ({"tensors": [{"name": "a", "dtype": "float32", "shape": [0]}]}, "tensors"),
    ],
)
async def test_invalid_weight_update_is_rejected_with_param(
    unchanged_api: Api, body: dict[str, Any], param: str
) -> None:
    assert (await unchanged_api.post("/update_weights", body, 400))["error"]["param"] == param


async def test_unservable_weights_return_400_and_keep_version(tmp_path: Path) -> None:
    engine = RecordingEngine()
    engine.refusal = ConfigError("the weights lack model.norm.weight")
    async with open_api(engine) as api:
        error = (await api.post("/update_weights", {"path": str(tmp_path)}, 400))["error"]
        assert (error["message"], error["param"]) == ("the weights lack model.norm.weight", "path")
        whole = await api.http.post("/v1/completions", json={"prompt": "x"})
        assert whole.json()["weights_version"] == "1"


GROUP = {"master_address": "127.0.0.1", "master_port": 29500}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"master_port": 1}, "master_address"),
        ({"master_address": "127.0.0.1"}, "master_port"),
        (GROUP | {"master_address": "a b"}, "master_address"),
        (GROUP | {"master_port": 65536}, "master_port"),
        (GROUP | {"rank": 0}, "rank"),
        (GROUP | {"rank": 2}, "rank"),
        (GROUP | {"backend": "mpi"}, "backend"),
        (GROUP | {"timeout": 0}, "timeout"),
    ],
)
async def test_invalid_weights_group_is_rejected_with_param(
    unchanged_api: Api, body: dict[str, Any], param: str
) -> None:
    assert (await unchanged_api.post("/init_weights_group", body, 400))["error"]["param"] == param
    assert (await unchanged_api.post("/close_weights_group", None))["weights_version"] == "1"


@pytest.mark.parametrize("query", ["level=0", "level=3", "mode=later", "refuse=perhaps"])
async def test_invalid_sleep_query_is_rejected_with_param(unchanged_api: Api, query: str) -> None:
    error = (await unchanged_api.post(f"/sleep?{query}", None, 400))["error"]
    assert error["param"] == query.partition("=")[0]


async def test_weight_routes_require_admin_key() -> None:
    async with open_api(RecordingEngine(), api_key=["sk-user", "sk-other"], admin_api_key=["sk-admin"]) as api:
        for path, body in ROUTES.items():
            for key, expected in (("sk-user", 403), ("sk-wrong", 401), ("sk-admin", 200)):
                answer = await api.http.post(path, json=body, headers={"Authorization": f"Bearer {key}"})
                assert answer.status_code == expected, (path, answer.text)
            elsewhere = {"Authorization": "Bearer sk-admin", "Origin": "http://elsewhere"}
            assert (await api.http.post(path, json=body, headers=elsewhere)).status_code == 200, path


@pytest.mark.parametrize(
    ("address", "headers", "expected"),
    [
        ("127.0.0.1", {}, 200),
        ("::1", {}, 200),
        ("127.0.0.1", {"Origin": "http://quire"}, 403),
        ("127.0.0.1", {"Origin": "http://elsewhere"}, 403),
        ("127.0.0.1", {"Origin": "null"}, 403),
        ("192.0.2.7", {}, 403),
    ],
)
async def test_weight_routes_without_keys_accept_only_local_non_browser_calls(
    address: str, headers: dict[str, str], expected: int
) -> None:
    async with open_http(make_app(RecordingEngine()), (address, 1234)) as http:
        for path, body in ROUTES.items():
            answer = await http.post(path, json=body, headers=headers)
            assert answer.status_code == expected, (path, answer.text)
        assert (await http.get("/is_sleeping", headers=headers)).status_code == 200, "which changes nothing"
