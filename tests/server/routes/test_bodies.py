"""A body is parsed the same way on the event loop and in a worker, in one piece or in many."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

from quire.server.pipeline.resolve import QUICK_BYTES, SMALL_BYTES
from tests.server.api import Api, open_api
from tests.server.cli.processes import has_ended
from tests.server.fake import FakeEngine, scripted
from tests.server.test_error_responses import BAD_INPUTS

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
ASKED: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi \u4e16"}], "max_tokens": 9}
TOOL = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}
GOOD: list[tuple[str, dict[str, Any]]] = [
    (COMPLETIONS, {"prompt": "Once"}),
    (COMPLETIONS, {"prompt": ["a", "bc"], "n": 2, "seed": 5, "echo": True, "logprobs": 2}),
    (COMPLETIONS, {"prompt": [[5, 6], [7]], "stop": ["x", "yz"], "logit_bias": {"5": -3}, "bad_words": ["no"]}),
    (COMPLETIONS, {"prompt": "a", "guided_regex": "[ab]+", "cache_salt": "s", "priority": 3, "user": "me"}),
    (COMPLETIONS, {"prompt": "a b c d", "truncate_prompt_tokens": 2, "prompt_logprobs": 1, "return_token_ids": True}),
    (COMPLETIONS, {"prompt": "a", "use_beam_search": True, "n": 2}),
    (CHAT, ASKED),
    (CHAT, {**ASKED, "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}}),
    (CHAT, {**ASKED, "tools": [TOOL], "tool_choice": "required"}),
    (CHAT, {**ASKED, "tools": [TOOL], "logprobs": True, "top_logprobs": 3, "reasoning_effort": "low"}),
    (CHAT, {**ASKED, "messages": [{"role": "user", "content": [{"type": "text", "text": "a"}] * 3}]}),
    ("/invocations", {"prompt": "a", "request_id": "mine"}),
    ("/tokenize", {"prompt": "Once upon", "return_token_strs": True}),
    ("/tokenize", {"messages": ASKED["messages"]}),
    ("/detokenize", {"tokens": [72, 105]}),
]
PADDED = (0, QUICK_BYTES, SMALL_BYTES)
THINKS = "{% for m in messages %}{{ m.content }}{% endfor %}<think>{{ tools }}<tool_call></tool_call>"


@pytest.fixture
async def api() -> AsyncIterator[Api]:
    engine = FakeEngine(scripted(b'{"a": 1}', 258), eos=[258])
    async with open_api(engine, chat_template=THINKS, tool_call_parser="hermes") as api:
        yield api


async def post_padded(api: Api, path: str, body: dict[str, Any], padding: int) -> tuple[Any, list[Any]]:
    """Return the response without the fields that change from call to call, and the engine's requests."""
    before = len(api.engine.seen)
    response = await api.http.post(path, content=json.dumps(body).encode() + b" " * padding, headers=JSON)
    answer = response.json()
    for name in ("id", "created"):
        answer.pop(name, None)
    requests = [msgspec.structs.asdict(request) for request in api.engine.seen[before:]]
    for request in requests:
        del request["id"]
        if body.get("seed") is None:
            del request["seed"]
    return (response.status_code, answer), requests


JSON = {"content-type": "application/json"}


@pytest.mark.few(2)
@pytest.mark.parametrize(("path", "body"), GOOD, ids=lambda value: str(value)[:50])
async def test_parsed_request_is_equal_on_event_loop_and_in_worker(api: Api, path: str, body: dict[str, Any]) -> None:
    here, between, there = [await post_padded(api, path, body, padding) for padding in PADDED]
    assert here[0][0] == 200, here
    assert here == between == there
    assert api.runtime.workers.worker_pids, "the last was read in a worker"


async def test_error_response_is_equal_on_event_loop_and_in_worker(api: Api) -> None:
    for call, _, _ in BAD_INPUTS:
        path, body = call
        here, there = await post_padded(api, path, body, 0), await post_padded(api, path, body, SMALL_BYTES)
        assert here[0][0] == 400, call
        assert here == there


async def test_request_chat_template_is_rendered_in_worker() -> None:
    async with open_api(FakeEngine(scripted(b"ab", 258), eos=[258]), trust_request_chat_template=True) as api:
        await api.post(CHAT, {**ASKED, "chat_template": "{{ messages[0].content }}!"})
        assert api.runtime.workers.worker_pids
        assert bytes(api.engine.seen[-1].prompt_ids).decode() == "Hi \u4e16!"
        endless = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
        doubling = "{% set n = namespace(x='a' * 9999) %}{% for i in range(40) %}{% set n.x = n.x ~ n.x %}{% endfor %}"
        for template in (endless, doubling):
            await api.post(CHAT, {**ASKED, "chat_template": template}, 400)
        await api.post("/tokenize", {"messages": ASKED["messages"], "chat_template": doubling}, 400)
        await api.post(CHAT, ASKED)


async def test_disconnect_while_body_is_parsed_kills_worker() -> None:
    async with open_api(FakeEngine(scripted(b"ab", 258), eos=[258]), trust_request_chat_template=True) as api:
        workers = api.runtime.workers
        slow = "{% for a in range(999) %}{% for b in range(999) %}{% endfor %}{% endfor %}"
        call = asyncio.create_task(api.post(CHAT, {**ASKED, "chat_template": slow}))
        async with asyncio.timeout(60):
            while not workers.num_busy:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
            (pid,) = workers.worker_pids
            call.cancel()
            while not has_ended(pid):  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        assert not api.engine.seen
        assert api.app.state.server.body_reader.reserved_bytes == 0
