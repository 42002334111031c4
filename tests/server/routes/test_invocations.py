"""POST /invocations, and answer ids that callers choose."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.server.api import Api, open_api, parse_events
from tests.server.fake import FakeEngine, hashed, scripted

COMPLETIONS, CHAT, INVOCATIONS = "/v1/completions", "/v1/chat/completions", "/invocations"
HELLO = [{"role": "user", "content": "Hello"}]
BODIES: list[tuple[str, dict[str, Any]]] = [
    (COMPLETIONS, {"prompt": "Hi", "max_tokens": 5, "seed": 1, "logprobs": 1, "request_id": "a"}),
    (COMPLETIONS, {"prompt": [[65, 66], [67]], "max_tokens": 5, "seed": 1, "n": 2, "echo": True, "request_id": "a"}),
    (CHAT, {"messages": HELLO, "max_tokens": 5, "seed": 1, "request_id": "a", "prompt": None}),
]


@pytest.mark.parametrize(("path", "body"), BODIES)
async def test_invocation_equals_endpoint_for_body(path: str, body: dict[str, Any]) -> None:
    async with open_api(FakeEngine(hashed(b"abc "))) as api:

        def timeless(answer: Any) -> Any:
            return {**answer, "created": 0}

        assert timeless(await api.post(INVOCATIONS, body)) == timeless(await api.post(path, body))
        streams = [await api.events(each, body) for each in (INVOCATIONS, path)]
        assert [list(map(timeless, stream)) for stream in streams] == [list(map(timeless, streams[0]))] * 2
        assert api.engine.seen[0].params == api.engine.seen[-1].params


@pytest.mark.parametrize(
    "body",
    [{}, {"max_tokens": 1}, {"prompt": "x", "messages": HELLO}, {"messages": None}, {"input": "x", "prompt": "x"}],
)
async def test_invocation_requires_either_messages_or_prompt(api: Api, body: dict[str, Any]) -> None:
    error = (await api.post(INVOCATIONS, body, 400))["error"]
    assert error["param"] == "messages"
    assert "give either messages or prompt" in error["message"]


async def test_invocation_errors_equal_endpoint_errors(api: Api) -> None:
    for path, body in (
        (CHAT, {"messages": [{"content": "x"}], "max_tokens": "x"}),
        (CHAT, {"messages": HELLO, "top_logprobs": 3}),
        (COMPLETIONS, {"prompt": {"a": 1}}),
        (COMPLETIONS, {"prompt": "x", "logit_bias": {"a": 1}}),
        (COMPLETIONS, {"prompt": "x", "model": "none"}),
    ):
        answers = [await api.http.post(each, json=body) for each in (path, INVOCATIONS)]
        assert answers[0].status_code == answers[1].status_code >= 400
        assert answers[0].json() == answers[1].json()
    for body in ([1], "x", 3):
        assert "JSON object" in (await api.post(INVOCATIONS, body, 400))["error"]["message"]


async def test_invocation_counts_for_rate_limit_and_needs_key() -> None:
    async with open_api(FakeEngine(hashed(b"abc")), requests_per_minute=1) as api:
        await api.post(INVOCATIONS, {"prompt": "x", "max_tokens": 1})
        await api.post(INVOCATIONS, {"prompt": "x", "max_tokens": 1}, 429)
    async with open_api(FakeEngine(hashed(b"abc")), api_key=["k"]) as api:
        await api.post(INVOCATIONS, {"prompt": "x"}, 401)


@pytest.mark.parametrize(
    ("path", "prompt", "prefix"), [(COMPLETIONS, {"prompt": "x"}, "cmpl"), (CHAT, {"messages": HELLO}, "chatcmpl")]
)
async def test_answer_id_comes_from_request_id(api: Api, path: str, prompt: dict[str, Any], prefix: str) -> None:
    async def ids(body: dict[str, Any], header: str | None) -> set[str]:
        headers = {} if header is None else {"X-Request-Id": header}
        whole = await api.http.post(path, json={**prompt, "max_tokens": 2, **body}, headers=headers)
        streamed = await api.http.post(path, json={**prompt, "max_tokens": 2, "stream": True, **body}, headers=headers)
        return {whole.json()["id"], *(event["id"] for event in parse_events(streamed.text)[:-1])}

    assert await ids({"request_id": "from-body"}, None) == {f"{prefix}-from-body"}
    assert await ids({}, "from.header") == {f"{prefix}-from.header"}
    assert await ids({"request_id": "from-body"}, "from.header") == {f"{prefix}-from-body"}
    random = await ids({}, None) | await ids({}, "not a sound one")
    assert {len(each) for each in random} == {len(prefix) + 33}
    assert len(random) == 4


async def test_cancel_by_id_aborts_all_open_answers_with_same_id() -> None:
    async with open_api(FakeEngine(scripted(b"a" * 400, 258), step_seconds=0.005)) as api:
        body = {"prompt": "x", "max_tokens": 400, "request_id": "twin/1"}
        posts = [asyncio.create_task(api.post(COMPLETIONS, body)) for _ in range(2)]
        while len(api.engine.running) < 2:
            await api.engine.sent.wait()
            await asyncio.sleep(0.01)
        cancelled = (await api.http.delete("/v1/requests/cmpl-twin/1")).json()
        assert cancelled["sequences"] == 2
        for answer in await asyncio.gather(*posts):
            assert (answer["id"], answer["choices"][0]["finish_reason"]) == ("cmpl-twin/1", "abort")
        assert len({request.id for request in api.engine.seen}) == 2
