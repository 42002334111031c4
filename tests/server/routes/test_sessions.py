"""Fields of each API's body that keep a conversation's blocks, and the request that warms a session: on a fake engine
here, on real ones in tests/e2e/test_sessions.py.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.server.api import Api, open_api
from tests.server.fake import FakeEngine, hashed

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
MARK = {"type": "ephemeral", "ttl": "1h"}


def body(path: str, **fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": "Hello"}]
    if path == MESSAGES:
        return {"messages": messages, "max_tokens": 2, **fields}
    if path == RESPONSES:
        return {"input": messages, "max_output_tokens": 2, **fields}
    return (
        {"messages": messages, "max_tokens": 2, **fields}
        if path == CHAT
        else {"prompt": "Hi", "max_tokens": 2, **fields}
    )


@pytest.mark.parametrize("path", ["/v1/completions", CHAT, RESPONSES, MESSAGES])
async def test_every_api_accepts_session_fields(api: Api, path: str) -> None:
    answer = await api.http.post(path, json=body(path, session_id="talk", session_ttl=30))
    assert answer.status_code == 200, answer.text
    assert "x-ignored-params" not in answer.headers
    await api.post(path, body(path, prompt_cache_key="key"))
    await api.post(path, body(path, prompt_cache_retention="24h"))
    await api.post(path, body(path))
    sessions = [(each.session, each.keep_seconds) for each in api.engine.seen]
    assert sessions == [("talk", 30.0), ("", 600.0), ("", 86400.0), ("", 0.0)]


async def test_anthropic_cache_control_ttl_sets_keep_seconds(api: Api) -> None:
    text = {"type": "text", "text": "Hello"}
    marked = [
        {"system": [{**text, "cache_control": {"type": "ephemeral"}}]},
        {"messages": [{"role": "user", "content": [text, {**text, "cache_control": MARK}]}]},
        {"tools": [{"name": "f", "input_schema": {"type": "object"}, "cache_control": MARK}]},
        {"cache_control": {"type": "ephemeral"}},
        {"cache_control": {"type": "ephemeral"}, "system": [{**text, "cache_control": MARK}]},
        {"cache_control": MARK, "session_ttl": 7},
    ]
    for fields in marked:
        await api.post(MESSAGES, body(MESSAGES) | fields)
    assert [each.keep_seconds for each in api.engine.seen] == [300, 3600, 3600, 300, 3600, 7]
    refused = await api.http.post(MESSAGES, json=body(MESSAGES, cache_control={"type": "ephemeral", "ttl": "1y"}))
    assert refused.status_code == 400
    assert "ttl" in refused.text


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"session_id": "x" * 257}, "session_id"),
        ({"session_ttl": 0}, "session_ttl"),
        ({"session_ttl": 86401}, "session_ttl"),
        ({"session_id": "a", "use_beam_search": True, "n": 2}, "session_id"),
        ({"prompt_cache_key": "a", "use_beam_search": True, "n": 2}, "prompt_cache_key"),
        ({"prompt_cache_retention": "1w"}, "prompt_cache_retention"),
    ],
)
async def test_invalid_session_fields_are_rejected(idle_api: Api, fields: dict[str, Any], named: str) -> None:
    answer = await idle_api.http.post("/v1/completions", json=body("/v1/completions", **fields))
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, named)


async def test_session_warm_prefills_tokens_of_last_turn(api: Api) -> None:
    await api.post(CHAT, body(CHAT, session_id="talk", session_ttl=50))
    (chat_request,) = api.engine.seen
    warmed = await api.post("/v1/sessions/talk/warm", {})
    assert warmed["object"] == "session.warmed"
    assert warmed["tokens"] == warmed["cached_tokens"] + warmed["computed_tokens"] == len(chat_request.prompt_ids) + 2
    again = api.engine.seen[-1]
    assert again.prompt_ids[: len(chat_request.prompt_ids)] == chat_request.prompt_ids
    assert (again.keep_seconds, again.session, again.sampling_params.max_tokens) == (50.0, "", 1)
    assert (await api.post("/v1/sessions/talk/warm", {}))["tokens"] == warmed["tokens"], "a hint is no turn"
    without = await api.http.post("/v1/sessions/talk/warm")
    assert without.status_code == 200
    for other, salt in (("walk", ""), ("talk", "salt")):
        answer = await api.http.post(f"/v1/sessions/{other}/warm", json={"cache_salt": salt})
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "request_not_found")


async def test_sessions_are_separate_per_api_key() -> None:
    async with open_api(FakeEngine(hashed(b"abc")), api_key=["one", "two"]) as api:
        one, two = ({"Authorization": f"Bearer {key}"} for key in ("one", "two"))
        await api.http.post(CHAT, json=body(CHAT, session_id="talk"), headers=one)
        assert (await api.http.post("/v1/sessions/talk/warm", json={}, headers=two)).status_code == 404
        assert (await api.http.post("/v1/sessions/talk/warm", json={}, headers=one)).status_code == 200
