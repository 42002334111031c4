"""API keys and admin keys, what is separate per key, rate limits, CORS, and a full queue."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from quire.server.access.path_rules import PUBLIC_PATHS
from tests.server.api import Api, open_api
from tests.server.fake import FakeEngine, hashed

LETTERS = hashed(b"abcdefgh")
KEYS = ["first", "second"]
COMPLETIONS = "/v1/completions"
METHODS = ["GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS", "TRACE", "PROPFIND"]
LLAMA_CPP_PATHS = ("/completion", "/infill", "/slots")
UNKNOWN_PATHS = ["/web", "/v1/nowhere", "/openapi.json", "/docs", "/v1/engine/", "/v1/engine/x"]
UNKNOWN_PATHS += ["/v1//health", "/health/"]
WRONG_HEADERS = [
    {},
    *(
        {"Authorization": value}
        for value in ("Bearer wrong", "first", "Bearer", "Bearer ", "Basic first", "Bearer first second")
    ),
    {"Authorization": "Bearer f\xefrst".encode("latin-1")},
    {"X-Api-Key": "wrong"},
    {"X-Api-Key": "Bearer first"},
    {"Authorization": "Bearer wrong", "X-Api-Key": "first"},
]


def key(name: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {name}"}


async def test_every_nonpublic_route_requires_api_key() -> None:
    async with open_api(FakeEngine(LETTERS), api_key=KEYS) as api:
        routes = {*api.app.openapi()["paths"], *(getattr(route, "path", "/") for route in api.app.routes)}
        assert {COMPLETIONS, "/metrics", "/tokenize", "/v1/models/{model}"} <= routes
        for path in sorted((routes | set(UNKNOWN_PATHS)) - PUBLIC_PATHS - {"/"}):
            for method in METHODS:
                for headers in WRONG_HEADERS if method == "POST" else WRONG_HEADERS[:2]:
                    answer = await api.http.request(method, path, headers=headers, content=b"x" * 100)
                    assert answer.status_code == 401, (method, path, headers)
                    assert answer.headers["www-authenticate"] == "Bearer"
                    if method == "HEAD":
                        continue
                    if path == "/v1/systemone":
                        assert answer.json()["detail"]["error_type"] == "authentication_error"
                        continue
                    error = answer.json()["error"]
                    if path.startswith("/api/"):
                        assert "API key" in error
                        continue
                    assert error["type"] == "authentication_error"
                    code = 401 if path in LLAMA_CPP_PATHS else "invalid_api_key"
                    assert path.startswith("/v1/messages") or error["code"] == code
        for path in PUBLIC_PATHS:
            assert (await api.http.get(path)).status_code == 200
        assert api.engine.seen == []
        with pytest.raises(openai.AuthenticationError):
            await api.openai.completions.create(model="second", prompt="Hi")
        for name in KEYS:
            answer = await api.openai.with_options(api_key=name).completions.create(model="second", prompt="Hi")
            assert answer.choices[0].text
            response = await api.http.get("/v1/models", headers={"X-Api-Key": name})
            assert response.status_code == 200


async def test_admin_routes_require_admin_key() -> None:
    async with open_api(FakeEngine(LETTERS), api_key=KEYS, admin_api_key=["root"]) as api:
        for path in ("/v1/engine/events", "/v1/engine/x"):
            rejection = await api.http.get(path, headers=key("first"))
            assert (rejection.status_code, rejection.json()["error"]["type"]) == (403, "permission_error")
        assert (await api.http.get("/v1/engine/x", headers=key("root"))).status_code == 404
        assert (await api.http.get("/v1/models", headers=key("root"))).status_code == 200
    async with open_api(FakeEngine(LETTERS), api_key=["only"]) as api:
        assert (await api.http.get("/v1/engine/x", headers=key("only"))).status_code == 404


async def test_metrics_key_reads_only_metrics() -> None:
    async with open_api(FakeEngine(LETTERS), api_key=KEYS, metrics_api_key=["scraper"]) as api:
        for headers in (key("scraper"), {"X-Api-Key": "scraper"}, key("first")):
            answer = await api.http.get("/metrics", headers=headers)
            assert answer.status_code == 200
            assert "vllm:num_requests_running" in answer.text
        assert (await api.http.get("/metrics", headers=key("wrong"))).status_code == 401
        paths = {*api.app.openapi()["paths"], "/metrics/", "/v1/engine/x", *UNKNOWN_PATHS} - PUBLIC_PATHS - {"/metrics"}
        for path in sorted(paths):
            for method in METHODS:
                answer = await api.http.request(method, path, headers=key("scraper"))
                assert answer.status_code == 401, (method, path)
        assert api.engine.seen == []


async def test_metrics_key_works_while_draining() -> None:
    async with open_api(FakeEngine(LETTERS), api_key=KEYS, metrics_api_key=["scraper"]) as api:
        for runtime in api.app.state.server.models.loaded_runtimes:
            runtime.admission.start_draining()
        assert (await api.http.get("/health")).status_code == 503
        assert (await api.http.get("/metrics", headers=key("scraper"))).status_code == 200


async def test_only_owner_or_admin_cancels_request() -> None:
    async with open_api(SlowEngine(), api_key=KEYS, admin_api_key=["root"]) as api:
        for name, status in (("second", 404), ("first", 200), ("root", 200)):
            call = asyncio.create_task(ask(api, "first", stream=True))
            await open_requests(api, 1)
            (request_id,) = {request.id.rpartition("-")[0] for request in api.engine.seen[-1:]}
            answer = await api.http.delete(f"/v1/requests/{request_id}", headers=key(name))
            assert answer.status_code == status
            if status == 404:
                assert (await api.http.delete(f"/v1/requests/{request_id}", headers=key("first"))).status_code == 200
            await call
            api.engine.running.clear()


@pytest.mark.parametrize("share", [False, True])
async def test_api_keys_share_prefix_cache_only_if_configured(share: bool) -> None:
    async with open_api(FakeEngine(LETTERS), api_key=KEYS, share_prefix_cache=share) as api:
        for name in [*KEYS, "first"]:
            await api.http.post(COMPLETIONS, json={"prompt": "Hi", "cache_salt": "s"}, headers=key(name))
        salts = [request.cache_salt for request in api.engine.seen]
        assert len(set(salts)) == (1 if share else 2)
        assert salts[0] == salts[2]
        assert not any(name in salt for name in KEYS for salt in salts)


FILE = """
[alice]
key = "a"
weight = 2
priority = -1

[bob]
key = "b"
requests_per_minute = 3
tokens_per_minute = 100
"""


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    path = tmp_path / "keys.toml"
    path.write_text(FILE)
    return path


async def test_engine_requests_carry_tenant_weight_and_priority(key_file: Path) -> None:
    async with open_api(FakeEngine(LETTERS), api_key_file=key_file) as api:
        for name, priority in (("a", -1), ("b", 5)):
            for extra in ({}, {"use_beam_search": True, "max_tokens": 1}):
                body = {"prompt": "Hi", "priority": priority, **extra}
                await api.http.post(COMPLETIONS, json=body, headers=key(name))
        seen = [(request.tenant, request.weight, request.priority) for request in api.engine.seen]
        assert seen == [("alice", 2.0, -1)] * 2 + [("bob", 1.0, 5)] * 2
        for name, priority in (("a", -2), ("b", -1)):
            rejection = await api.http.post(COMPLETIONS, json={"prompt": "x", "priority": priority}, headers=key(name))
            assert (rejection.status_code, rejection.json()["error"]["param"]) == (400, "priority")
        assert len(api.engine.seen) == 4


async def ask(api: Api, name: str, **fields: Any) -> httpx.Response:
    return await api.http.post(COMPLETIONS, json={"prompt": "Hi", "max_tokens": 5, **fields}, headers=key(name))


async def test_rate_limits_are_reported_and_enforced(key_file: Path) -> None:
    async with open_api(FakeEngine(LETTERS), api_key_file=key_file) as api:
        answer = await ask(api, "b", max_tokens=8, n=2)
        assert answer.status_code == 200
        assert answer.headers["x-ratelimit-limit-requests"] == "3"
        assert answer.headers["x-ratelimit-remaining-requests"] == "2"
        assert answer.headers["x-ratelimit-remaining-tokens"] == "82"  # 2 prompt tokens, 2 × 8 completion tokens
        assert answer.headers["x-ratelimit-reset-requests"] == "20s"
        await ask(api, "b")
        stream = await ask(api, "b", stream=True)
        assert stream.headers["x-ratelimit-remaining-requests"] == "0"
        rejection = await ask(api, "b")
        assert rejection.status_code == 429
        assert rejection.json()["error"] == {
            "message": rejection.json()["error"]["message"],
            "type": "rate_limit_error",
            "param": None,
            "code": "rate_limit_exceeded",
        }
        assert 0 < int(rejection.headers["retry-after"]) <= 20
        assert rejection.headers["x-ratelimit-remaining-requests"] == "0"
        with pytest.raises(openai.RateLimitError):
            await api.openai.with_options(api_key="b", max_retries=0).completions.create(model="second", prompt="Hi")
        for _ in range(5):
            assert "x-ratelimit-limit-requests" not in (await ask(api, "a")).headers
        assert (await api.http.get("/v1/models", headers=key("b"))).status_code == 200


async def test_tokenize_and_detokenize_count_as_requests(key_file: Path) -> None:
    async with open_api(FakeEngine(LETTERS), api_key_file=key_file) as api:
        for path, body in (("/tokenize", {"prompt": "x"}), ("/detokenize", {"tokens": [1]}), ("/tokenize", {})):
            answer = await api.http.post(path, json=body, headers=key("b"))
            assert answer.status_code == (200 if body else 400)
        assert (await ask(api, "b")).status_code == 429
        rejection = await api.http.post("/tokenize", json={"prompt": "x"}, headers=key("b"))
        assert (rejection.status_code, rejection.headers["x-ratelimit-remaining-requests"]) == (429, "0")
        answer = await api.http.post("/tokenize", json={"prompt": "x"}, headers=key("a"))
        assert answer.status_code == 200


async def test_rate_limit_returns_unused_reserved_tokens() -> None:
    async with open_api(FakeEngine(LETTERS, fail_at=3), api_key=KEYS, tokens_per_minute=60) as api:
        for stream in (False, True):
            await ask(api, "first", max_tokens=50, stream=stream)  # ends after 3 tokens with an error
        rejection = await ask(api, "first", max_tokens=59)
        assert rejection.status_code == 429
        assert rejection.headers["x-should-retry"] == "false"
        assert (await ask(api, "second", max_tokens=3)).headers["x-ratelimit-remaining-tokens"] == "55"
        assert rejection.headers["x-ratelimit-remaining-tokens"] == "50"
        api.engine.die("the engine died")
        assert (await ask(api, "second", max_tokens=40)).status_code == 503
        assert (await ask(api, "second", max_tokens=40)).status_code == 503, (
            "the tokens of the first request were returned"
        )


async def test_full_queue_returns_503_and_accepted_requests_complete() -> None:
    async with open_api(FakeEngine(LETTERS), max_num_seqs=2, max_queued_requests=3) as api:
        body = {"prompt": "Hi", "max_tokens": 30}
        answers = await asyncio.gather(*[api.http.post(COMPLETIONS, json=body) for _ in range(9)])
        statuses = sorted(answer.status_code for answer in answers)
        assert statuses == [200] * 5 + [503] * 4
        rejection = next(answer for answer in answers if answer.status_code == 503)
        assert rejection.headers["retry-after"]
        assert rejection.json()["error"]["code"] == "overloaded"
        assert (await api.http.post(COMPLETIONS, json=body)).status_code == 200


class SlowEngine(FakeEngine):
    """Computes nothing until `go` is set."""

    def __init__(self) -> None:
        super().__init__(LETTERS)
        self.go = asyncio.Event()

    async def _run(self) -> None:
        await self.go.wait()
        await super()._run()


async def open_requests(api: Api, count: int) -> None:
    while api.engine.owner.num_open < count:  # noqa: ASYNC110
        await asyncio.sleep(0)


async def test_max_queued_tokens_limits_prompt_tokens_in_queue() -> None:
    async with open_api(SlowEngine(), max_queued_tokens=100) as api:
        calls = [asyncio.create_task(ask(api, "", prompt="x" * 300))]  # an empty queue accepts a prompt of any length
        await open_requests(api, 1)
        rejection = await ask(api, "")
        assert rejection.status_code == 503
        assert "300 of 100" in rejection.json()["error"]["message"]
        api.engine.go.set()
        assert (await calls[0]).status_code == 200
        assert api.engine.owner.queued_tokens == 0
        api.engine.go.clear()
    async with open_api(SlowEngine(), max_queued_tokens=100) as api:
        calls = [asyncio.create_task(ask(api, "", prompt="x" * 30)) for _ in range(3)]
        await open_requests(api, 3)
        assert (await ask(api, "", prompt="x" * 11)).status_code == 503
        calls[0].cancel()
        await asyncio.gather(calls[0], return_exceptions=True)
        calls.append(asyncio.create_task(ask(api, "", prompt="x" * 11)))
        await open_requests(api, 3)
        assert api.engine.owner.queued_tokens == 71
        api.engine.go.set()
        assert [(await call).status_code for call in calls[1:]] == [200] * 3
        assert (api.engine.owner.queued_tokens, api.engine.owner.num_open, api.engine.owner.num_open_of("")) == (
            0,
            0,
            0,
        )


async def test_busy_api_key_leaves_queue_room_for_other_keys() -> None:
    async with open_api(SlowEngine(), api_key=KEYS, max_num_seqs=2, max_queued_requests=9) as api:
        greedy = [asyncio.create_task(ask(api, "first")) for _ in range(20)]
        while sum(call.done() for call in greedy) + api.engine.owner.num_open < 20:  # noqa: ASYNC110
            await asyncio.sleep(0)
        assert api.engine.owner.num_open == 7, (
            "two run, and five wait: half of the nine places in the queue, rounded up"
        )
        others = [asyncio.create_task(ask(api, "second")) for _ in range(20)]
        while sum(call.done() for call in others) + api.engine.owner.num_open_of("key-2") < 20:  # noqa: ASYNC110
            await asyncio.sleep(0)
        assert api.engine.owner.num_open_of("key-2") >= 2
        api.engine.go.set()
        statuses = [(await call).status_code for call in greedy + others]
        assert statuses.count(200) == 7 + statuses[20:].count(200)
        assert set(statuses) == {200, 503}


async def test_cors_allows_only_configured_origins() -> None:
    page = {"Origin": "https://a.example", "Access-Control-Request-Method": "POST"}
    async with open_api(FakeEngine(LETTERS), api_key=KEYS) as api:
        assert (await api.http.options(COMPLETIONS, headers=page)).status_code == 401
        answer = await api.http.post(COMPLETIONS, json={"prompt": "x"}, headers={**page, **key("first")})
        assert answer.status_code == 200
        assert not any(name.startswith("access-control") for name in answer.headers)
    async with open_api(FakeEngine(LETTERS), api_key=KEYS, allowed_origins=["https://a.example"]) as api:
        preflight = await api.http.options(
            COMPLETIONS, headers={**page, "Access-Control-Request-Headers": "authorization,content-type"}
        )
        assert preflight.status_code == 200
        assert preflight.headers["access-control-allow-origin"] == "https://a.example"
        assert "authorization" in preflight.headers["access-control-allow-headers"]
        answer = await api.http.post(
            COMPLETIONS, json={"prompt": "x", "stream": True}, headers={**page, **key("first")}
        )
        assert answer.headers["access-control-allow-origin"] == "https://a.example"
        rejection = await api.http.post(COMPLETIONS, json={"prompt": "x"}, headers=page)
        assert (rejection.status_code, rejection.headers["access-control-allow-origin"]) == (401, "https://a.example")
        other = await api.http.options(COMPLETIONS, headers={**page, "Origin": "https://b.example"})
        assert other.status_code == 400
        assert "access-control-allow-origin" not in other.headers


@pytest.mark.parametrize("allowed", [[], ["https://a.example"]])
async def test_rejected_cors_origin_is_logged_once_with_flag(
    allowed: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    page = {"Origin": "https://b.example\t", "Access-Control-Request-Method": "POST"}
    async with open_api(FakeEngine(LETTERS), allowed_origins=allowed) as api:
        for _ in range(2):
            assert (await api.http.options(COMPLETIONS, headers=page)).status_code >= 400
            await api.http.options(COMPLETIONS, headers={"Origin": "https://b.example"})  # not a preflight request
        assert "--allowed-origins" not in caplog.text
        for _ in range(9):
            await api.http.options(COMPLETIONS, headers=page)
    messages = [record.getMessage() for record in caplog.records if "--allowed-origins" in record.getMessage()]
    assert messages == [
        "web pages of 'https://b.example\\t' may not call this server: --allowed-origins lists the origins that may"
    ]


async def test_logs_contain_no_prompts_or_api_keys(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    async with open_api(FakeEngine(LETTERS, fail_at=4), api_key=["s3cret-key"]) as api:
        for body in (
            {"prompt": "private words"},
            {"prompt": "private words", "max_tokens": 2, "echo": True, "stream": True},
            {"prompt": "private words", "temperature": 9},
            {"prompt": "private words" * 100},
            {"prompt": ["private words", 5]},
            {"prompt": "private words", "stop": "private words" * 200},
            {"prompt": "private words", "response_format": {"type": "private words"}},
        ):
            for name in ("s3cret-key", "s3cret-wrong"):
                await api.http.post(COMPLETIONS, json=body, headers=key(name))
            chat = {"messages": [{"role": "user", "content": body["prompt"]}]}
            await api.http.post("/v1/chat/completions", json=chat, headers=key("s3cret-key"))
    messages = [record.getMessage() for record in caplog.records if not record.name.startswith(("httpx", "httpcore"))]
    assert not [line for line in messages if "private" in line or "s3cret" in line]
