"""API keys, what they keep apart, and a queue that is full."""

from __future__ import annotations

import asyncio

import openai
import pytest

from tests.server.fake import FakeEngine, hashed
from tests.server.house import open_house

LETTERS = hashed(b"abcdefgh")
KEYS = ["first", "second"]


async def test_every_route_but_health_needs_a_key() -> None:
    async with open_house(FakeEngine(LETTERS), api_key=KEYS) as house:
        for path in ("/v1/models", "/metrics", "/version", "/v1/nowhere", "/openapi.json", "/docs"):
            for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "first"}):
                answer = await house.http.get(path, headers=headers)
                assert answer.status_code == 401, (path, headers)
                error = answer.json()["error"]
                assert (error["type"], error["code"]) == ("authentication_error", "invalid_api_key")
        assert (await house.http.post("/v1/completions", json={"prompt": "Hi"})).status_code == 401
        for path in ("/health", "/ready", "/live", "/ping"):
            assert (await house.http.get(path)).status_code == 200
        assert house.engine.seen == []
        with pytest.raises(openai.AuthenticationError):
            await house.openai.completions.create(model="second", prompt="Hi")
        for key in KEYS:
            answer = await house.openai.with_options(api_key=key).completions.create(model="second", prompt="Hi")
            assert answer.choices[0].text


@pytest.mark.parametrize("share", [False, True])
async def test_keys_do_not_share_cached_prefixes_unless_told_to(share: bool) -> None:
    async with open_house(FakeEngine(LETTERS), api_key=KEYS, share_prefix_cache=share) as house:
        for key in [*KEYS, "first"]:
            headers = {"Authorization": f"Bearer {key}"}
            await house.http.post("/v1/completions", json={"prompt": "Hi", "cache_salt": "s"}, headers=headers)
        salts = [request.cache_salt for request in house.engine.seen]
        assert len(set(salts)) == (1 if share else 2)
        assert salts[0] == salts[2]
        assert not any(key in salt for key in KEYS for salt in salts)


async def test_a_full_queue_answers_503_and_the_others_go_on() -> None:
    async with open_house(FakeEngine(LETTERS), max_num_seqs=2, max_queued_requests=3) as house:
        body = {"prompt": "Hi", "max_tokens": 30}
        answers = await asyncio.gather(*[house.http.post("/v1/completions", json=body) for _ in range(9)])
        statuses = sorted(answer.status_code for answer in answers)
        assert statuses == [200] * 5 + [503] * 4
        refused = next(answer for answer in answers if answer.status_code == 503)
        assert refused.headers["retry-after"]
        assert refused.json()["error"]["code"] == "overloaded"
        assert (await house.http.post("/v1/completions", json=body)).status_code == 200
