"""POST /v1/responses on scripted answers, against the OpenAI SDK's own types."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.server.api import NAME, Api, open_api
from tests.server.fake import FakeEngine, hashed, scripted
from tests.server.formats.test_tools import TWO_CALLS
from tests.server.openai_responses import RESPONSE, events_of, folded, without_ids
from tests.server.resolve.test_tool_requests import HERMES, prompt, speaker
from tests.texts import CHATML

EOS = 258
PATH = "/v1/responses"
HELLO: dict[str, Any] = {"model": NAME, "input": "Hello"}
PLACE = {"city": {"type": "string"}, "days": {"type": "integer"}}
WEATHER = {"type": "function", "name": "weather", "parameters": {"type": "object", "properties": PLACE}}
CLOCK = {"type": "function", "name": "clock", "parameters": None}
PATCH = {"type": "custom", "name": "patch", "description": "Applies a patch."}
TOOLS = [WEATHER, CLOCK, PATCH]


def patch_tool(definition: str, syntax: str = "lark") -> dict[str, Any]:
    return {**PATCH, "format": {"type": "grammar", "syntax": syntax, "definition": definition}}


TWO = TWO_CALLS["hermes"]
PATCHED = (
    '<tool_call>\n{"name": "patch", "arguments": {"input": "*** a\\n\\"é\\u00e9\\ud83d\\ude00\\\\"}}\n</tool_call>'
)


async def stream(api: Api, body: dict[str, Any]) -> list[Any]:
    return events_of(await api.stream_text(PATH, body))


async def test_response_has_reasoning_text_and_calls_whole_and_streamed() -> None:
    async with speaker(f"<think>Hm.</think>Let me see.\n{TWO}\n{PATCHED}", reasoning_parser="think") as api:
        body = {**HELLO, "tools": TOOLS, "instructions": "Be brief.", "metadata": {"a": "b"}}
        whole = await api.post(PATH, body)
        events = await stream(api, body)
        assert without_ids(folded(events)) == without_ids(whole)
        used = len(api.engine.seen[0].prompt_ids)
        assert "system\nBe brief." in prompt(api)
    RESPONSE.validate_python(whole)
    assert whole["id"].startswith("resp_")
    assert (whole["object"], whole["status"], whole["model"]) == ("response", "completed", NAME)
    reasoning, message, weather, clock, patch = whole["output"]
    assert (reasoning["summary"], reasoning["content"]) == ([], [{"type": "reasoning_text", "text": "Hm."}])
    assert message["content"] == [{"type": "output_text", "text": "Let me see.", "annotations": [], "logprobs": []}]
    assert (weather["type"], weather["name"]) == ("function_call", "weather")
    assert json.loads(weather["arguments"]) == {"city": "Rome", "days": 2}
    assert (clock["name"], clock["arguments"]) == ("clock", "{}")
    assert (patch["type"], patch["name"], patch["input"]) == ("custom_tool_call", "patch", '*** a\n"éé😀\\')
    assert len({item["id"] for item in whole["output"]}) == 5
    assert all(item["status"] == "completed" for item in whole["output"])
    usage = whole["usage"]
    assert (usage["input_tokens"], usage["input_tokens_details"]["cached_tokens"]) == (used, used // 2)
    assert usage["output_tokens_details"]["reasoning_tokens"] > 0
    assert (whole["instructions"], whole["metadata"], len(whole["tools"])) == ("Be brief.", {"a": "b"}, 3)
    kinds = {event["type"] for event in events}
    assert {f"response.{kind}.delta" for kind in ("function_call_arguments", "custom_tool_call_input")} <= kinds
    pieces = [event for event in events if event["type"] == "response.function_call_arguments.delta"]
    assert len(pieces) > 20, "arguments come while they are generated"


texts = st.lists(
    st.sampled_from(
        ["a é", "<think>", "</think>", " \n", "b</", TWO, PATCHED, PATCHED[:-22], "<tool_call>\n", '{"name": "patch", ']
    )
)


@settings(deadline=None)
@given(text=texts.map("".join), most=st.integers(1, 300), burst=st.integers(1, 4))
async def test_streamed_response_assembles_to_whole_response(text: str, most: int, burst: int) -> None:
    engine = FakeEngine(scripted(text.encode(), EOS), eos=[EOS], max_model_len=4096, burst=burst)
    body = {**HELLO, "tools": TOOLS, "max_output_tokens": most}
    async with open_api(engine, chat_template=HERMES, reasoning_parser="think") as api:
        whole = await api.post(PATH, body)
        assert without_ids(folded(await stream(api, body))) == without_ids(whole)
    RESPONSE.validate_python(whole)
    assert whole["output"], "clients read the first item"


@settings(deadline=None)
@given(text=st.text("aé€ ", max_size=9), most=st.integers(1, 30), burst=st.integers(1, 4))
async def test_streamed_logprobs_assemble_to_whole_logprobs(text: str, most: int, burst: int) -> None:
    body = {**HELLO, "max_output_tokens": most, "top_logprobs": 2}
    async with open_api(FakeEngine(scripted(text.encode(), EOS), eos=[EOS], burst=burst)) as api:
        whole = await api.post(PATH, body)
        assert without_ids(folded(await stream(api, body))) == without_ids(whole)
    (content,) = whole["output"][0]["content"]
    assert len(content["logprobs"]) == len(text.encode()[:most])


async def test_openai_sdk_reads_response_and_stream() -> None:
    async with speaker("Hello") as api:
        answer = await api.openai.responses.create(model=NAME, input="Hi", temperature=0.5)
        assert (answer.output_text, answer.status, answer.temperature) == ("Hello", "completed", 0.5)
        async with api.openai.responses.stream(model=NAME, input=[{"role": "user", "content": "Hi"}]) as events:
            texts = [event.delta async for event in events if event.type == "response.output_text.delta"]
            final = await events.get_final_response()
        assert "".join(texts) == final.output_text == "Hello"


async def test_response_logprobs_list_bytes_and_top_alternatives() -> None:
    async with open_api(FakeEngine(scripted("é!".encode(), EOS), eos=[EOS])) as api:
        body = {**HELLO, "top_logprobs": 1, "include": ["message.output_text.logprobs"]}
        (content,) = (await api.post(PATH, body))["output"][0]["content"]
        assert [entry["bytes"] for entry in content["logprobs"]] == [[0xC3], [0xA9], [0x21]]
        assert all(len(entry["top_logprobs"]) == 1 for entry in content["logprobs"])
        assert without_ids(folded(await stream(api, body)))["output"][0]["content"] == [content]


async def test_incomplete_and_empty_responses_have_status_and_text() -> None:
    async with speaker("Hello") as api:
        for body in ({**HELLO, "max_output_tokens": 2}, {**HELLO, "max_output_tokens": 2, "stream": True}):
            if "stream" in body:
                answer = folded(await stream(api, body))
            else:
                answer = await api.post(PATH, body)
            assert (answer["status"], answer["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
            assert answer["output"][0]["status"] == "incomplete"
    async with speaker("") as api:
        whole = await api.post(PATH, HELLO)
        assert whole["output"][0]["content"][0]["text"] == ""
        assert without_ids(folded(await stream(api, HELLO))) == without_ids(whole)


async def test_engine_error_in_stream_sends_response_failed() -> None:
    async with open_api(FakeEngine(hashed(b"ab"), fail_at=3)) as api:
        events = await stream(api, HELLO)
        error = await api.post(PATH, HELLO, 500)
    last = events[-1]
    assert (last["type"], last["response"]["status"]) == ("response.failed", "failed")
    assert last["response"]["error"] == {"code": "server_error", "message": "the engine tripped"}
    assert error["error"]["type"] == "server_error"


async def test_input_items_become_template_messages() -> None:
    items = [
        {"role": "developer", "content": [{"type": "input_text", "text": "d"}]},
        {"role": "user", "content": "a"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "b"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "t"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "c", "annotations": []}]},
        {"type": "function_call", "call_id": "1", "name": "weather", "arguments": '{"city": "Rome"}'},
        {"type": "custom_tool_call", "call_id": "2", "name": "patch", "input": "x\n"},
        {"type": "function_call_output", "call_id": "1", "output": "20"},
        {"type": "custom_tool_call_output", "call_id": "2", "output": [{"type": "input_text", "text": "ok"}]},
        {"type": "function_call", "call_id": "3", "name": "clock", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "3", "output": ""},
    ]
    async with speaker("x", chat_template="{{ messages | tojson }}{# tools #}") as api:
        await api.post(PATH, {**HELLO, "instructions": "s", "input": items})
        seen = json.loads(prompt(api).partition("<tool_call>")[0])
    assert [turn["role"] for turn in seen] == ["system", "user", "assistant", "tool", "tool", "assistant", "tool"]
    assert [turn["content"] for turn in seen] == ["s\nd", "a\nb", "c", "20", "ok", "", ""]
    assert seen[2]["reasoning_content"] == "t"
    calls = [(call["id"], call["function"]["name"], call["function"]["arguments"]) for call in seen[2]["tool_calls"]]
    assert calls == [("1", "weather", {"city": "Rome"}), ("2", "patch", {"input": "x\n"})]
    assert [turn.get("name") for turn in seen[3:5]] == ["weather", "patch"]


async def test_encrypted_reasoning_round_trips_to_template() -> None:
    async with speaker(
        "<think>Secret é</think>So", reasoning_parser="think", chat_template="{{ messages|tojson }}"
    ) as api:
        answer = await api.post(PATH, {**HELLO, "include": ["reasoning.encrypted_content"]})
        reasoning = {**answer["output"][0], "content": None}
        items = [{"role": "user", "content": "a"}, reasoning, {"role": "assistant", "content": "So"}]
        await api.post(PATH, {**HELLO, "input": items})
        assert json.loads(prompt(api))[1]["reasoning_content"] == "Secret é"
        foreign = {
            "type": "reasoning",
            "summary": [{"type": "summary_text", "text": "s"}],
            "encrypted_content": "gAAA_",
        }
        await api.post(PATH, {**HELLO, "input": [items[0], foreign]})
        assert json.loads(prompt(api))[1]["reasoning_content"] == "s"


async def test_tool_choice_controls_calls_and_grammar() -> None:
    async with speaker(TWO) as api:
        for fields, called in (({}, 2), ({"parallel_tool_calls": False}, 1), ({"tool_choice": "none"}, 0)):
            answer = await api.post(PATH, {**HELLO, "tools": TOOLS, **fields})
            assert sum(item["type"] == "function_call" for item in answer["output"]) == called
        for choice, names in (
            ("required", {"weather", "clock", "patch"}),
            ({"type": "function", "name": "clock"}, {"clock"}),
            ({"type": "custom", "name": "patch"}, {"patch"}),
            (
                {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "clock"}]},
                {"clock"},
            ),
        ):
            await api.post(PATH, {**HELLO, "tools": TOOLS, "tool_choice": choice})
            grammar = api.engine.seen[-1].params.grammar
            assert grammar is not None
            assert {name for name in ("weather", "clock", "patch") if name in grammar.text} == names


async def test_namespaced_tools_round_trip() -> None:
    space = {"type": "namespace", "name": "sky", "description": "d", "tools": [WEATHER, PATCH]}
    text = TWO.partition("\n<tool_call>")[0].replace('"weather"', '"sky.weather"') + PATCHED.replace(
        "patch", "sky.patch"
    )
    async with speaker(text) as api:
        body = {**HELLO, "tools": [space, CLOCK]}
        whole = await api.post(PATH, body)
        assert without_ids(folded(await stream(api, body))) == without_ids(whole)
        assert '"sky.weather"' in prompt(api)
        weather, patch = whole["output"]
        assert [(item["namespace"], item["name"]) for item in (weather, patch)] == [
            ("sky", "weather"),
            ("sky", "patch"),
        ]
        assert patch["type"] == "custom_tool_call"
        result = {"type": "function_call_output", "call_id": weather["call_id"], "output": "20"}
        await api.post(PATH, {**body, "input": [{"role": "user", "content": "x"}, weather, result]})
        assert "=sky.weather(Rome)" in prompt(api)


async def test_text_format_sets_grammar() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    form = {"type": "json_schema", "name": "x", "schema": schema, "strict": True}
    async with speaker('{"a": 1}', chat_template=CHATML) as api:
        answer = await api.post(PATH, {**HELLO, "text": {"format": form}})
        assert api.engine.seen[-1].params.grammar is not None
        assert answer["text"]["format"] == form
        await api.post(PATH, {**HELLO, "text": {"format": {"type": "json_object"}}})
        assert api.engine.seen[-1].params.grammar is not None
        for broken in ({**form, "schema": {"type": "nothing"}}, {**form, "schema": None}):
            error = (await api.post(PATH, {**HELLO, "text": {"format": broken}}, 400))["error"]
            assert error["param"] == "text.format"
            assert "text.format" in error["message"]


BAD: list[tuple[dict[str, Any], str, str]] = [
    ({"input": []}, "input", "input"),
    ({"input": None}, "input", "input"),
    ({"input": [{"type": "novel"}]}, "input", "input[0]"),
    ({"input": [{"type": "computer_call_output"}]}, "input", "input[0]"),
    ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input", "content[0]"),
    ({"input": [{"type": "function_call"}]}, "input", "call_id"),
    ({"input": [{"type": "item_reference"}]}, "input", "input[0].id"),
    ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input", "--data-dir"),
    ({"input": "x" * 5000}, "input", "input came to"),
    ({"input": [{"role": "user", "content": "x"}] * 5000}, "input", "input came to"),
    ({"tools": [{"type": "file_search", "vector_store_ids": []}]}, "tools", "tools[0]"),
    ({"tools": [{**WEATHER, "parameters": {"type": "array"}, "strict": True}]}, "tools", "tools[0].parameters"),
    ({"tools": [{**WEATHER, "name": str(number)} for number in range(1025)]}, "tools", "1025"),
    ({"tools": TOOLS, "tool_choice": {"type": "function", "name": "x"}}, "tool_choice", "no tool named x"),
    ({"tools": [CLOCK, CLOCK]}, "tools", "two tools named clock"),
    ({"tools": TOOLS, "tool_choice": {"type": "mcp"}}, "tool_choice", "tool_choice"),
    ({"tools": [{**PATCH, "format": {"type": "grammar", "syntax": "bnf", "definition": "x"}}]}, "tools", "tools[0]"),
    ({"tools": [{**PATCH, "format": {"type": "grammar", "syntax": "lark"}}]}, "tools", "tools[0]"),
    ({"tools": [patch_tool('start: "(" start? ")"')]}, "tools", "tools[0].format: the grammar of patch: the grammar"),
    ({"tools": [patch_tool('begin: "x"')]}, "tools", "no rule named start"),
    ({"tools": [patch_tool("(", "regex")]}, "tools", "tools"),
    ({"max_output_tokens": 0}, "max_output_tokens", "max_output_tokens"),
    ({"top_logprobs": 99}, "top_logprobs", "top_logprobs"),
    ({"top_logprobs": 1, "tools": [WEATHER]}, "top_logprobs", "/v1/chat/completions has them"),
    ({"temperature": -1}, "temperature", "temperature"),
    ({"metadata": {str(number): "" for number in range(17)}}, "metadata", "16"),
    ({"safety_identifier": "x" * 65}, "safety_identifier", "64"),
    ({"prompt_cache_key": "x" * 65}, "prompt_cache_key", "64"),
    ({"tools": [{**WEATHER, "description": "x" * 2**20}], "tool_choice": "none"}, "tools", "repeats at most 1048576"),
    ({"text": {"format": {"type": "text", "description": "x" * 2**20}}}, "text", "repeats at most 1048576"),
    ({"prompt": {"id": "x"}}, "prompt", "prompt"),
    ({"n": 2}, "n", "n "),
    ({"max_tokens": 5}, "max_tokens", "max_tokens"),
    ({"messages": []}, "messages", "messages"),
]


@pytest.mark.few(2)
@pytest.mark.parametrize(("fields", "param", "named"), BAD, ids=range(len(BAD)))
async def test_invalid_response_field_is_rejected_with_param(fields: dict[str, Any], param: str, named: str) -> None:
    async with speaker("x") as api:
        error = (await api.post(PATH, {**HELLO, **fields}, 400))["error"]
        assert (error["type"], error["param"]) == ("invalid_request_error", param)
        assert named in error["message"]
        assert api.engine.seen == []


async def test_chat_fields_of_other_servers_apply_to_responses() -> None:
    async with speaker("<think>Hm.</think>Let me see.", reasoning_parser="think") as api:
        fields = {"top_k": 3, "stop": "see", "include_reasoning": False}
        whole = await api.post(PATH, {**HELLO, **fields})
        assert api.engine.seen[0].params.top_k == 3
    (message,) = whole["output"]
    assert message["content"][0]["text"] == "Let me "


async def test_ignored_response_fields_are_listed_in_header() -> None:
    search = [{"type": "web_search", "external_web_access": False}, {"type": "tool_search", "execution": "client"}]
    fields = {"truncation": "auto", "text": {"verbosity": "low"}, "reasoning": {"effort": "low", "summary": "auto"}}
    async with speaker("x", chat_template=CHATML) as api:
        answer = await api.http.post(
            PATH, json={**HELLO, **fields, "tools": search, "user": "me", "prompt_cache_key": "x"}
        )
    ignored = set(answer.headers["x-ignored-params"].split(", "))
    assert ignored == {"user", "truncation", "text.verbosity", "reasoning.effort", "reasoning.summary"} | {
        "tools.0",
        "tools.1",
    }
