"""A pinned session keeps its blocks under load and is restored by a warm request, with real engines, several API
processes and a KV tier.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.e2e.server import Server

pytestmark = pytest.mark.slow
PAGES = 120
WAYS = {"one": ("--kv-offload-memory", "1"), "api processes": ("--kv-offload-memory", "1", "--api-server-count", "2")}


@pytest.fixture(scope="module", params=WAYS.values(), ids=WAYS)
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("server") / "log"
    running = Server(log, "--num-kv-blocks", str(PAGES), "--threads", "1", *request.param)
    yield running
    assert running.stop() == 0, log.read_text()


async def complete(http: httpx.AsyncClient, prompt: list[int], **fields: Any) -> tuple[list[int], int]:
    """Return the answer's tokens and the number of cached prompt tokens."""
    body = {"prompt": prompt, "max_tokens": 6, "temperature": 0, "ignore_eos": True, "return_token_ids": True, **fields}
    answer = await http.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    body_received = answer.json()
    return body_received["choices"][0]["token_ids"], body_received["usage"]["prompt_tokens_details"]["cached_tokens"]


async def fill_cache_with_others(http: httpx.AsyncClient, first: int) -> None:
    for number in range(6):
        await complete(http, [(first + number) * 7 % 1000 + 300 + place % 300 for place in range(480)])


async def test_pinned_session_keeps_blocks_and_warm_restores_same_tokens(server: Server) -> None:
    limits = httpx.Limits(max_keepalive_connections=0)
    async with httpx.AsyncClient(base_url=server.url, timeout=240, limits=limits) as http:
        talk = [400 + place * 13 % 900 for place in range(300)]
        answer, _ = await complete(http, talk, session_id="talk")
        await fill_cache_with_others(http, 1)
        talk += [*answer, 350, 351, 352]
        again, cached = await complete(http, talk, session_id="talk")
        assert cached == 304, "six others of four times the cache's size came between"
        assert server.metric("quire:sessions_kept") == 1
        assert server.metric("quire:session_returns_total") >= 1
        expected, _ = await complete(http, [*talk, *again, 360], cache_salt="elsewhere")
        warmed = (await http.post("/v1/sessions/talk/warm", json={"session_ttl": 0.001})).json()
        assert (warmed["object"], warmed["tokens"]) == ("session.warmed", len(talk) + len(again))
        await fill_cache_with_others(http, 100)  # its TTL is over, so its blocks are evicted like others
        warmed = (
            await http.post("/v1/sessions/talk/warm")
        ).json()  # loaded from the tier, or computed if that is faster
        assert warmed["tokens"] == warmed["cached_tokens"] + warmed["computed_tokens"]
        actual, cached = await complete(http, [*talk, *again, 360], session_id="talk")
        assert (actual, cached) == (expected, 304)
        assert (await http.post("/v1/sessions/walk/warm")).status_code == 404


async def test_cache_diagnostics_find_answers_of_every_api_process(server: Server) -> None:
    limits = httpx.Limits(max_keepalive_connections=0)  # a new connection may reach another process
    async with httpx.AsyncClient(base_url=server.url, timeout=240, limits=limits) as http:
        body: dict[str, Any] = {"max_tokens": 1, "messages": [{"role": "user", "content": "A fox and a crow. " * 9}]}
        first = (await http.post("/v1/messages", json={**body, "diagnostics": {}})).json()
        for turn in range(8):
            compared = {**body, "system": "Hi. " * 9 * (turn % 2), "diagnostics": {"previous_message_id": first["id"]}}
            diagnostics = (await http.post("/v1/messages", json=compared)).json()["diagnostics"]
            assert (diagnostics and diagnostics["cache_miss_reason"]["type"]) == (
                "system_changed" if turn % 2 else None
            )
