"""Logprobs that a stream keeps count against a budget. A user saw: streams whose last event repeats all logprobs kept
these uncounted (issue 56, item 6).
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from quire.server.generation import output_parts
from tests.server.api import NAME, open_api
from tests.server.fake import FakeEngine, hashed

LETTERS = hashed(b"abcdefgh")
BODY: dict[str, Any] = {
    "model": NAME,
    "input": "Hi",
    "max_output_tokens": 40,
    "top_logprobs": 4,
    "include": ["message.output_text.logprobs"],
}


def last_event(text: str) -> Any:
    return json.loads(text.strip().rpartition("\n\n")[2].partition("data: ")[2])


@pytest.mark.parametrize("stream", [False, True])
async def test_response_with_too_many_logprobs_fails_streamed_or_whole(
    monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    async with open_api(FakeEngine(LETTERS)) as api:
        monkeypatch.setattr(output_parts, "MAX_LOGPROBS", 100)
        answer = await api.http.post("/v1/responses", json=BODY | {"stream": stream})
        assert (answer.status_code, "log probabilities" in answer.text) == (200 if stream else 400, True)
        if stream:
            assert last_event(answer.text)["type"] == "response.failed"
        fewer = BODY | {"stream": stream, "max_output_tokens": 16}
        answer = await api.http.post("/v1/responses", json=fewer)
        assert answer.status_code == 200
        assert "log probabilities" not in answer.text, "what has ended is counted no more"


async def test_chat_stream_logprobs_are_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    async with open_api(FakeEngine(LETTERS)) as api:
        monkeypatch.setattr(output_parts, "MAX_LOGPROBS", 100)
        messages = [{"role": "user", "content": "Hi"}]
        body = {"messages": messages, "max_tokens": 60, "logprobs": True, "top_logprobs": 4}
        assert len(await api.events("/v1/chat/completions", body)) > 40


async def test_logprobs_of_all_response_streams_are_bounded_together(monkeypatch: pytest.MonkeyPatch) -> None:
    async with open_api(FakeEngine(LETTERS, step_seconds=0.002)) as api:
        monkeypatch.setattr(output_parts, "MAX_LOGPROBS_IN_ALL", 400)
        posts = (api.http.post("/v1/responses", json=BODY | {"stream": True}) for _ in range(6))
        kinds = [last_event(answer.text)["type"] for answer in await asyncio.gather(*posts)]
        assert set(kinds) == {"response.failed", "response.completed"} or kinds.count("response.incomplete") > 0
        assert "response.failed" in kinds
        assert kinds.count("response.failed") < 6
