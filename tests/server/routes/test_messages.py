"""POST /v1/messages and /v1/messages/count_tokens on scripted answers; tests/clients runs Anthropic's own SDK."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.server.anthropic import folded, named_events, without_ids
from tests.server.api import NAME, Api, open_api
from tests.server.fake import FakeEngine, hashed, scripted
from tests.server.formats.test_tools import TWO_CALLS
from tests.server.resolve.test_tool_requests import HERMES, prompt, speaker
from tests.texts import CHATML

EOS = 258
PATH = "/v1/messages"
COUNT = "/v1/messages/count_tokens"
HELLO: dict[str, Any] = {"model": NAME, "max_tokens": 600, "messages": [{"role": "user", "content": "Hello"}]}
PLACE = {"city": {"type": "string"}, "days": {"type": "integer"}}
WEATHER = {"name": "weather", "description": "d", "input_schema": {"type": "object", "properties": PLACE}}
CLOCK = {"name": "clock", "input_schema": {"type": "object"}}
TOOLS = [WEATHER, CLOCK]
TWO = TWO_CALLS["hermes"]
THINKING = CHATML + "{# enable_thinking #}{% if enable_thinking is false %}off{% endif %}"


async def stream(api: Api, body: dict[str, Any]) -> list[Any]:
    return named_events(await api.stream_text(PATH, body))


async def refused(api: Api, body: Any, status: int = 400, path: str = PATH) -> str:
    """Return the message of an error, after a check of the error's form."""
    error = await api.post(path, body, status)
    assert error.keys() == {"type", "error"}
    assert error["type"] == "error"
    assert error["error"].keys() == {"type", "message"}
    kinds = {400: "invalid_request_error", 404: "not_found_error", 413: "request_too_large", 500: "api_error"}
    assert error["error"]["type"] == kinds[status]
    return str(error["error"]["message"])


async def test_message_has_thinking_text_and_tool_use_whole_and_streamed() -> None:
    async with speaker(f"<think>Hm.</think>Let me see.\n{TWO}", reasoning_parser="think") as api:
        body = {**HELLO, "tools": TOOLS}
        whole = await api.post(PATH, body)
        events = await stream(api, body)
        assert without_ids(folded(events)) == without_ids(whole)
        used = len(api.engine.seen[0].prompt_ids)
    assert whole["id"].startswith("msg_")
    assert (whole["type"], whole["role"], whole["model"]) == ("message", "assistant", NAME)
    thinking, text, *calls = whole["content"]
    assert thinking == {"type": "thinking", "thinking": "Hm.", "signature": ""}
    assert text == {"type": "text", "text": "Let me see.", "citations": None}
    assert [(call["name"], call["input"]) for call in calls] == [
        ("weather", {"city": "Rome", "days": 2}),
        ("clock", {}),
    ]
    assert len({call["id"] for call in calls}) == 2
    assert (whole["stop_reason"], whole["stop_sequence"]) == ("tool_use", None)
    usage = whole["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == used
    assert usage["cache_read_input_tokens"] == used // 2
    assert usage["output_tokens_details"]["thinking_tokens"] > 0
    start = events[0]["message"]["usage"]
    assert start["cache_read_input_tokens"] == used // 2, "known before the first text"
    pieces = [event for event in events if event.get("delta", {}).get("type") == "input_json_delta"]
    assert len(pieces) > 20, "arguments come while they are generated"


texts = st.lists(
    st.sampled_from(["a é", "<think>", "</think>", " \n", "b</", TWO, "<tool_call>\n", '{"name": "clock", "arguments"'])
)


@settings(deadline=None)
@given(
    text=texts.map("".join),
    most=st.integers(1, 200),
    stop=st.lists(st.sampled_from(["a", "é", "ok", "days", "</think>"]), max_size=2),
    burst=st.integers(1, 4),
)
async def test_streamed_message_assembles_to_whole_message(text: str, most: int, stop: list[str], burst: int) -> None:
    engine = FakeEngine(scripted(text.encode(), EOS), eos=[EOS], max_model_len=2048, burst=burst)
    body = {**HELLO, "tools": TOOLS, "max_tokens": most, "stop_sequences": stop}
    async with open_api(engine, chat_template=HERMES, reasoning_parser="think") as api:
        whole = await api.post(PATH, body)
        assert without_ids(folded(await stream(api, body))) == without_ids(whole)
    assert whole["content"], "clients read the first block"


@pytest.mark.parametrize(
    ("fields", "reason", "sequence"),
    [
        ({}, "end_turn", None),
        ({"max_tokens": 2}, "max_tokens", None),
        ({"stop_sequences": ["l"]}, "stop_sequence", "l"),
        ({"stop_token_ids": [ord("l")]}, "end_turn", None),
        ({"max_tokens": 10_000, "ignore_eos": True}, "model_context_window_exceeded", None),
    ],
)
async def test_stop_reason_names_cause_whole_and_streamed(
    fields: dict[str, Any], reason: str, sequence: str | None
) -> None:
    async with open_api(FakeEngine(scripted(b"Hello", EOS), eos=[EOS])) as api:
        for message in (await api.post(PATH, {**HELLO, **fields}), folded(await stream(api, {**HELLO, **fields}))):
            assert (message["stop_reason"], message["stop_sequence"]) == (reason, sequence)


async def test_empty_answer_has_empty_text_block() -> None:
    async with open_api(FakeEngine(scripted(b"", EOS), eos=[EOS])) as api:
        whole = await api.post(PATH, HELLO)
        assert whole["content"] == [{"type": "text", "text": "", "citations": None}]
        assert without_ids(folded(await stream(api, HELLO))) == without_ids(whole)


async def test_tool_conversation_becomes_template_messages() -> None:
    template = "{{ messages | tojson }}{# tools #}"
    turns = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "user", "content": "c"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "t", "signature": "s"},
                {"type": "redacted_thinking", "data": "x"},
                {"type": "text", "text": "d", "citations": None},
                {"type": "tool_use", "id": "1", "name": "weather", "input": {"city": "Rome"}, "cache_control": None},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "text", "text": "20"}]},
                {"type": "tool_result", "tool_use_id": "2", "content": "broken", "is_error": True},
                {"type": "text", "text": "e", "cache_control": {"type": "ephemeral"}},
            ],
        },
    ]
    async with speaker("x", chat_template=template) as api:
        await api.post(PATH, {**HELLO, "system": [{"type": "text", "text": "s"}], "messages": turns})
        seen = json.loads(prompt(api).partition("<tool_call>")[0])
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Rome"}}}
    assert [turn["role"] for turn in seen] == ["system", "user", "assistant", "tool", "tool", "user"]
    assert [turn["content"] for turn in seen] == ["s", "a\nb\nc", "d", "20", "Error: broken", "e"]
    assert seen[2]["reasoning_content"] == "t"
    assert seen[2]["tool_calls"] == [call]
    assert (seen[3]["tool_call_id"], seen[3]["name"], seen[4]["tool_call_id"]) == ("1", "weather", "2")


@pytest.mark.parametrize(
    ("refused", "roles", "contents"),
    [
        ("false", ["system", "user", "system", "assistant", "system"], ["s", "a", "b", "c", "d"]),
        (
            "not loop.first",
            ["system", "user", "user", "assistant", "user"],
            ["s", "a", "<system>\nb\n</system>", "c", "<system>\nd\n</system>"],
        ),
        (
            "true",
            ["user", "user", "user", "assistant", "user"],
            ["<system>\ns\n</system>", "a", "<system>\nb\n</system>", "c", "<system>\nd\n</system>"],
        ),
    ],
)
async def test_system_text_becomes_user_text_when_template_rejects_system(
    refused: str, roles: list[str], contents: list[str]
) -> None:
    template = (
        f"{{% for m in messages %}}{{% if m.role == 'system' and ({refused}) %}}{{{{ raise_exception('no') }}}}"
        "{% endif %}{% endfor %}{{ messages | tojson }}"
    )
    turns = [("user", "a"), ("system", "b"), ("assistant", "c"), ("system", "d")]
    messages = [{"role": role, "content": content} for role, content in turns]
    items = [{"role": "developer" if role == "system" else role, "content": content} for role, content in turns]
    async with speaker("x", chat_template=template) as api:
        await api.post(PATH, {**HELLO, "system": "s", "messages": messages})
        await api.post("/v1/responses", {"instructions": "s", "input": items})
        for request in api.engine.seen:
            rendered = json.loads(bytes(request.prompt_ids).decode())
            assert ([turn["role"] for turn in rendered], [turn["content"] for turn in rendered]) == (roles, contents)


async def test_last_assistant_message_is_continued() -> None:
    async with speaker("!", chat_template=CHATML) as api:
        talk = [*HELLO["messages"], {"role": "assistant", "content": "Well"}]
        assert (await api.post(PATH, {**HELLO, "messages": talk}))["content"] == [
            {"type": "text", "text": "!", "citations": None}
        ]
        assert prompt(api).endswith("assistant\nWell")
        await api.post(PATH, {**HELLO, "messages": [*HELLO["messages"], {"role": "assistant", "content": []}]})
        assert prompt(api).endswith("assistant\n")


async def test_billing_line_and_cache_marks_do_not_change_prefix() -> None:
    """Claude Code sends a billing line, and cache marks that move to the newest blocks."""

    def request(number: int, turns: list[Any]) -> dict[str, Any]:
        line = f"x-anthropic-billing-header: cc_version=2.1.{number}; cch={number:05x};"
        system = [line, "You are an agent.", "The rules."]
        blocks = [{"type": "text", "text": text} for text in system]
        blocks[number] |= {"cache_control": {"type": "ephemeral"}}
        return {**HELLO, "tools": TOOLS, "system": blocks, "messages": turns, "metadata": {"user_id": str(number)}}

    marked = {"cache_control": {"type": "ephemeral"}}
    async with speaker("Done.", chat_template=HERMES) as api:
        turns: list[Any] = [{"role": "user", "content": [{"type": "text", "text": "Look. " * 20, **marked}]}]
        first = await api.post(PATH, request(1, turns))
        turns = [{"role": "user", "content": [{"type": "text", "text": "Look. " * 20}]}]
        turns += [{"role": "assistant", "content": first["content"]}, {"role": "user", "content": "Go on."}]
        await api.post(PATH, request(2, turns))
        await api.post(
            PATH, {**request(2, turns), "system": "x-anthropic-billing-header: a=b;\nYou are an agent.\nThe rules."}
        )
        before, after, plain = [each.prompt_ids for each in api.engine.seen]
    assert after[: len(before)] == before
    assert plain == after


async def test_tool_choice_controls_calls_and_grammar() -> None:
    async with speaker(TWO) as api:
        for choice, called in (({"type": "auto"}, 2), ({"type": "auto", "disable_parallel_tool_use": True}, 1)):
            answer = await api.post(PATH, {**HELLO, "tools": TOOLS, "tool_choice": choice})
            assert sum(block["type"] == "tool_use" for block in answer["content"]) == called
        none = await api.post(PATH, {**HELLO, "tools": TOOLS, "tool_choice": {"type": "none"}})
        assert [block["type"] for block in none["content"]] == ["text"]
        assert "weather" not in prompt(api)
        await api.post(PATH, {**HELLO, "tools": TOOLS, "tool_choice": {"type": "any"}})
        assert api.engine.seen[-1].params.grammar is not None
        await api.post(PATH, {**HELLO, "tools": TOOLS, "tool_choice": {"type": "tool", "name": "clock"}})
        grammar = api.engine.seen[-1].params.grammar
        assert grammar is not None
        assert "clock" in grammar.text
        assert "weather" not in grammar.text


async def test_thinking_field_switches_template_variable() -> None:
    async with speaker("<think>Hm.</think>So", chat_template=THINKING, reasoning_parser="think") as api:
        for thinking, off in (
            (None, True),
            ({"type": "disabled"}, True),
            ({"type": "enabled", "budget_tokens": 9}, False),
        ):
            answer = await api.http.post(PATH, json={**HELLO, "thinking": thinking})
            kinds = [block["type"] for block in answer.json()["content"]]
            assert kinds == (["text"] if thinking == {"type": "disabled"} else ["thinking", "text"])
            assert ("off" in prompt(api)) is off
        assert answer.headers["x-ignored-params"] == "thinking.budget_tokens", "bytes are no tokens of thinking"
    async with speaker("So", chat_template=THINKING) as api:
        await api.post(PATH, {**HELLO, "chat_template_kwargs": {"enable_thinking": True}})
        assert "off" not in prompt(api), "the caller's own variables win"
        await api.post(PATH, {**HELLO, "chat_template_kwargs": {"other": True}})
        assert "off" in prompt(api)
    async with speaker("So", chat_template=CHATML) as api:
        answer = await api.http.post(PATH, json={**HELLO, "thinking": {"type": "enabled", "budget_tokens": 9}})
        assert answer.headers["x-ignored-params"] == "thinking"


async def test_output_format_sets_grammar() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    async with speaker("{}", chat_template=CHATML) as api:
        for fields in (
            {"output_config": {"format": {"type": "json_schema", "schema": schema}}},
            {"output_format": {"type": "json_schema", "schema": schema}},
        ):
            await api.post(PATH, {**HELLO, **fields})
            assert api.engine.seen[-1].params.grammar is not None
        broken = {"type": "json_schema", "schema": {"type": "nothing"}}
        assert "output_config.format" in await refused(api, {**HELLO, "output_config": {"format": broken}})


async def test_count_tokens_equals_prompt_length(api: Api) -> None:
    body = {**HELLO, "system": "Be brief."}
    counted = await api.post(COUNT, {name: value for name, value in body.items() if name != "max_tokens"})
    await api.post(PATH, body)
    assert counted == {"input_tokens": len(api.engine.seen[-1].prompt_ids)}
    long = {"messages": [{"role": "user", "content": "x" * 5000}]}
    assert (await api.post(COUNT, long))["input_tokens"] > api.engine.max_model_len
    half = json.dumps({"messages": [{"role": "user", "content": "\ud800"}]})
    response = await api.http.post(COUNT, content=half, headers={"content-type": "application/json"})
    assert (response.status_code, "surrogate" in response.text) == (400, True)
    assert "messages[0].role" in await refused(api, {"messages": [{"role": "x", "content": ""}]}, path=COUNT)


def deep(levels: int) -> Any:
    schema: dict[str, Any] = {}
    for _ in range(levels):
        schema = {"properties": {"a": schema}}
    return schema


BAD: list[tuple[dict[str, Any], str]] = [
    ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "messages[0].content[0]"),
    ({"messages": [{"role": "user", "content": [{"type": "novel"}]}]}, "messages[0].content[0]"),
    (
        {"messages": [{"role": "user", "content": [{"type": "tool_use", "id": "", "name": "", "input": {}}]}]},
        "messages",
    ),
    ({"messages": [{"role": "assistant", "content": [{"type": "tool_result", "tool_use_id": ""}]}]}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "user", "content": []}]}, "messages"),
    ({"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}] * 10_001}]}, "messages[0].content"),
    ({"system": [{"type": "image"}]}, "system[0].type"),
    (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "x", "cache_control": True}]}]},
        "messages[0].content[0].cache_control: Input should be an object",
    ),
    (
        {"system": [{"type": "text", "text": "x", "cache_control": {"type": "ephemeral", "ttl": "1m"}}]},
        "system[0].cache_control.ttl",
    ),
    ({"messages": [{"role": "user", "content": [{"type": "text", "text": 5}]}]}, "messages[0].content[0].text: "),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": None}, "max_tokens"),
    ({"max_tokens": None, "max_token": 1}, "got max_token: did you mean max_tokens?"),
    ({"messages": [{"role": "usr", "content": "x"}]}, "did you mean user?"),
    ({"temperature": 1.5}, "temperature"),
    ({"stop_sequences": ["x"] * 100}, "stop_sequences"),
    ({"stop_sequences": ["\ud800"]}, "stop_sequences"),
    ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0].type"),
    ({"tools": [{**CLOCK, "input_schema": {"type": "array"}, "strict": True}]}, "tools[0].input_schema"),
    ({"tools": [{**CLOCK, "name": str(number)} for number in range(1025)]}, "tools"),
    ({"tools": [CLOCK, CLOCK]}, "tools[1]"),
    ({"tools": [{**CLOCK, "input_schema": deep(60)}]}, "nested"),
    ({"tools": [CLOCK], "tool_choice": {"type": "tool", "name": "x"}}, "tool_choice"),
    ({"tools": [CLOCK], "tool_choice": {"type": "some"}}, "tool_choice"),
    ({"thinking": {"type": "enabled", "budget_tokens": -1}}, "thinking"),
    ({"seed": "x"}, "seed"),
    ({"chat_template_kwargs": "x"}, "chat_template_kwargs"),
    ({"n": 2}, "n "),
    ({"stop": ["x"]}, "use stop_sequences"),
    ({"stop": ["x"]}, "stop is not"),
    ({"logprobs": True}, "logprobs"),
    ({"use_beam_search": True}, "use_beam_search"),
    ({"mcp_servers": [{"url": "x"}]}, "mcp_servers"),
]


@pytest.mark.few(8)
@pytest.mark.parametrize(("fields", "named"), BAD, ids=range(len(BAD)))
async def test_invalid_message_field_is_rejected_by_name(fields: dict[str, Any], named: str) -> None:
    async with speaker("x") as api:
        body = {**HELLO, **fields}
        content = json.dumps(body)
        response = await api.http.post(PATH, content=content, headers={"content-type": "application/json"})
        assert response.status_code == 400, response.text
        error = response.json()
        assert (error["type"], error["error"]["type"]) == ("error", "invalid_request_error")
        assert named in error["error"]["message"]
        assert api.engine.seen == []


async def test_ignored_message_fields_are_listed_in_header(api: Api) -> None:
    fields = {"context_management": {"edits": []}, "service_tier": "auto", "metadata": {"user_id": "x"}, "seed": 1}
    headers = {"anthropic-version": "2023-06-01", "anthropic-beta": "x"}
    response = await api.http.post(f"{PATH}?beta=true", json={**HELLO, **fields, "max_tokens": 3}, headers=headers)
    assert response.headers["x-ignored-params"] == "context_management, service_tier"


async def test_errors_have_anthropic_format() -> None:
    async with open_api(FakeEngine(hashed(b"ab"), fail_at=3), api_key=["secret", "other"], max_body_size=0.01) as api:
        api.http.headers["x-api-key"] = "secret"
        assert "does not exist" in await refused(api, {**HELLO, "model": "x"}, 404)
        assert "larger than" in await refused(api, {**HELLO, "system": "x" * 100_000}, 413)
        assert "This server has no" in await refused(api, {}, 404, "/v1/messages/batches")
        assert "tripped" in await refused(api, HELLO, 500)
        events = named_events((await api.http.post(PATH, json={**HELLO, "stream": True})).text)
        assert events[-1] == {"type": "error", "error": {"type": "api_error", "message": "the engine tripped"}}
        api.http.headers["x-api-key"] = "wrong"
        error = await api.post(PATH, HELLO, 401)
        assert error["error"]["type"] == "authentication_error"
        assert (await api.post("/v1/completions", {}, 401))["error"]["code"] == "invalid_api_key"


async def test_silent_stream_sends_pings() -> None:
    async with open_api(FakeEngine(scripted(b"ab", EOS), eos=[EOS], step_seconds=0.5), sse_ping=0.1) as api:
        events = await stream(api, HELLO)
    assert {"type": "ping"} in events
    assert folded(events)["content"] == [{"type": "text", "text": "ab", "citations": None}]


async def test_cancelled_message_stops_with_max_tokens() -> None:
    async with open_api(FakeEngine(hashed(b"ab"), step_seconds=0.01)) as api:
        post_task = asyncio.create_task(api.http.post(PATH, json=HELLO, headers={"X-Request-Id": "mine"}))
        await api.engine.sent.wait()
        assert (await api.http.delete("/v1/requests/msg_mine")).status_code == 200
        answer = (await post_task).json()
        assert (answer["id"], answer["stop_reason"]) == ("msg_mine", "max_tokens")
        explained = (await api.http.get("/v1/requests/msg_mine/explain")).json()
        assert explained
