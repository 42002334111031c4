"""Tools in chat completions: the OpenAI SDK against scripted answers, streamed and whole."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai import BadRequestError

from quire.engine.client.engine_client import EngineClient
from quire.engine.common.request_params import SamplingParams
from quire.engine.text.tokenizer import Tokenizer
from quire.server.app import create_app
from quire.server.config import ServerConfig
from quire.server.formats.tools.tool_call_sink import ToolCallDelta
from quire.server.generation.choice_state import ChoiceDelta
from quire.server.generation.resolved_request import AnswerIdentity, Caller, GenerationRequest, Prompt
from quire.server.generation.response_writers.completion_chunks import ChatWriter
from quire.server.served_model import ServedModelSpec
from tests.server.api import Api, open_api, open_http, parse_events
from tests.server.fake import FakeEngine, scripted
from tests.server.forked import FORKED
from tests.server.formats.test_tools import PARTS, ROME, TWO_CALLS, slowly
from tests.server.formats.test_tools_grammar import make_tokenizer
from tests.texts import CHATML, byte_level_tokenizer, shared

EOS = 258
PATH = "/v1/chat/completions"
HELLO: list[Any] = [{"role": "user", "content": "Hello"}]
HERMES = (
    "{% if tools %}{{ tools | tojson }}<tool_call>{\"name\": …, \"arguments\": …}</tool_call>{% endif %}"
    "{% for m in messages %}{% for call in m.tool_calls or [] %}{{ call.id }}={{ call.function.name }}"
    "({{ call.function.arguments.city }}){% endfor %}{{ m.tool_call_id }}{% endfor %}"
) + CHATML  # fmt: skip
TWO = TWO_CALLS["hermes"]
ONE = TWO.partition("\n<tool_call>\n{\"name\": \"clock\"")[0]  # fmt: skip


def function(name: str, **properties: Any) -> Any:
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": properties}}}


def having(parameters: Any) -> Any:
    return {"type": "function", "function": {"name": "a", "parameters": parameters}}


def strict(tool: Any) -> Any:
    return {**tool, "function": {**tool["function"], "strict": True}}


TOOLS = [function("weather", city={"type": "string"}, days={"type": "integer"}), function("clock")]
EXPECTED = [("weather", ROME), ("clock", "{}")]


def speaker(text: str, **options: Any) -> Any:
    engine = FakeEngine(scripted(text.encode(), EOS), eos=[EOS], max_model_len=2048)
    return open_api(engine, **{"chat_template": HERMES, **options})


def calls_of(message: Any) -> list[tuple[str, str]]:
    return [(call.function.name, call.function.arguments) for call in message.tool_calls or []]


def prompt(api: Api) -> str:
    return bytes(token for token in api.engine.seen[-1].prompt_ids if token < 256).decode()


async def test_response_contains_parallel_calls() -> None:
    async with speaker("Let me see.\n" + TWO) as api:
        answer = await api.openai.chat.completions.create(model="second", messages=HELLO, tools=TOOLS)
        (choice,) = answer.choices
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content == "Let me see."
        assert calls_of(choice.message) == EXPECTED
        ids = {call.id for call in choice.message.tool_calls or []}
        assert len(ids) == 2
        assert all(one.startswith("call_") for one in ids)
        assert '"name": "weather"' in prompt(api)


async def test_calls_without_content_have_null_content() -> None:
    async with speaker(ONE) as api:
        whole = await api.post(PATH, {"messages": HELLO, "tools": TOOLS})
    (choice,) = whole["choices"]
    (call,) = choice["message"].pop("tool_calls")
    assert choice["message"] == {"role": "assistant", "content": None, "refusal": None}
    assert call == {"id": call["id"], "type": "function", "function": {"name": "weather", "arguments": ROME}}


async def test_streamed_call_deltas_follow_openai_format() -> None:
    async with speaker("Hm.\n" + TWO) as api:
        events = await api.events(PATH, {"messages": HELLO, "tools": TOOLS})
    choices = [event["choices"][0] for event in events]
    assert choices[0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(choice["delta"].get("content", "") for choice in choices) == "Hm."
    deltas = [delta for choice in choices for delta in choice["delta"].get("tool_calls", [])]
    assert all(len(choice["delta"].get("tool_calls", [0])) == 1 for choice in choices)
    for index, (name, arguments) in enumerate(EXPECTED):
        first, *rest = [delta for delta in deltas if delta["index"] == index]
        opening = {"index": index, "type": "function", "function": {"name": name, "arguments": ""}}
        assert first == {**opening, "id": first["id"]}
        assert all(delta.keys() == {"index", "function"} for delta in rest)
        assert "".join(delta["function"]["arguments"] for delta in rest) == arguments
    assert len(deltas) > 20, "arguments come while they are generated"
    assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + ["tool_calls"]


async def test_openai_sdk_assembles_streamed_calls() -> None:
    request: dict[str, Any] = {"model": "second", "messages": HELLO, "tools": TOOLS}
    async with speaker(TWO) as api, api.openai.chat.completions.stream(**request) as stream:
        events = [event async for event in stream]
        answer = await stream.get_final_completion()
    assert calls_of(answer.choices[0].message) == EXPECTED
    assert answer.choices[0].finish_reason == "tool_calls"
    done = [event for event in events if event.type == "tool_calls.function.arguments.done"]
    assert [(event.name, event.arguments) for event in done] == EXPECTED


async def test_tool_results_reach_template() -> None:
    async with speaker("It is 20 degrees.") as api:
        call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": ROME}}
        turns = [
            *HELLO,
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "call_1", "content": "20"},
        ]
        answer = await api.openai.chat.completions.create(model="second", messages=turns, tools=TOOLS)
        assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("It is 20 degrees.", "stop")
        assert "call_1=weather(Rome)call_1" in prompt(api)


async def test_invalid_json_arguments_reach_template_as_text() -> None:
    template = (
        "{% for m in messages %}{% for c in m.tool_calls or [] %}{{ c.function.arguments }}{% endfor %}{% endfor %}"
    )
    async with speaker("x", chat_template=template) as api:
        for arguments in ("{oops", "[" * 1500):
            turn = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}
            await api.post(PATH, {"messages": [turn]})
            assert prompt(api) == arguments


async def test_tokenize_includes_tools() -> None:
    async with speaker("x") as api:
        answer = await api.post("/tokenize", {"messages": HELLO, "tools": TOOLS})
        await api.post(PATH, {"messages": HELLO, "tools": TOOLS})
        assert answer["tokens"] == api.engine.seen[-1].prompt_ids


async def test_parallel_tool_calls_false_keeps_only_first_call() -> None:
    async with speaker(TWO) as api:
        body = {"messages": HELLO, "tools": TOOLS, "parallel_tool_calls": False}
        whole = await api.post(PATH, body)
        events = await api.events(PATH, body)
    (call,) = whole["choices"][0]["message"]["tool_calls"]
    assert call["function"]["name"] == "weather"
    assert whole["choices"][0]["finish_reason"] == events[-1]["choices"][0]["finish_reason"] == "tool_calls"
    indices = {delta["index"] for event in events for delta in event["choices"][0]["delta"].get("tool_calls", [])}
    assert indices == {0}


@pytest.mark.parametrize("more", [{}, {"tools": []}, {"tools": TOOLS, "tool_choice": "none"}, {"tools": None}])
async def test_call_markup_is_content_without_tools(more: dict[str, Any]) -> None:
    async with speaker(ONE) as api:
        whole = await api.post(PATH, {"messages": HELLO, **more})
        assert whole["choices"][0]["message"]["content"] == ONE
        assert whole["choices"][0]["finish_reason"] == "stop"
        assert "weather" not in prompt(api)


@pytest.mark.parametrize("length", [5, 30, 45, 50, 70, len(ONE)])
async def test_call_cut_by_max_tokens_has_finish_reason_length(length: int) -> None:
    async with speaker(ONE) as api:
        body = {"messages": HELLO, "tools": TOOLS, "max_tokens": length}
        whole = await api.post(PATH, body)
        events = await api.events(PATH, body)
    (choice,) = whole["choices"]
    assert choice["finish_reason"] == events[-1]["choices"][0]["finish_reason"] == "length"
    calls = choice["message"].get("tool_calls", [])
    assert calls or choice["message"]["content"] == ONE[:length]
    assert all(ROME.startswith(call["function"]["arguments"]) for call in calls)


def test_chat_writer_orders_reasoning_content_and_calls_of_step() -> None:
    """With several tokens per step, content and the call after it are in one delta."""
    tokenizer = byte_level_tokenizer().tokenizer
    named = {"identity": AnswerIdentity(id="id"), "caller": Caller(), "model": "m"}
    spec = GenerationRequest(prompts=[Prompt([1], "")], params=SamplingParams(), num_returned=1, **named)
    writer = ChatWriter(spec, tokenizer, "fp")
    calls = (ToolCallDelta(0, id="call_1", name="f"), ToolCallDelta(0, "{}"))
    delta = ChoiceDelta(0, "Hm.", [], "tool_calls", None, reasoning="why", tool_calls=calls)
    events = parse_events(writer.step_events([delta]).decode())
    kinds = [next(iter(event["choices"][0]["delta"]), None) for event in events]
    assert kinds == ["reasoning", "content", "tool_calls", "tool_calls", None]
    assert events[1]["choices"][0]["delta"] == {"content": "Hm."}
    assert [event["choices"][0]["finish_reason"] for event in events] == [None] * 4 + ["tool_calls"]


async def test_incomplete_call_has_finish_reason_stop() -> None:
    async with speaker(ONE[:50]) as api:
        whole = await api.post(PATH, {"messages": HELLO, "tools": TOOLS})
    assert whole["choices"][0]["message"]["tool_calls"][0]["function"]["arguments"] == ROME[: 50 - ONE.index(ROME)]
    assert whole["choices"][0]["finish_reason"] == "stop"


async def test_reasoning_is_separated_from_calls() -> None:
    text = f"<think>\nA <tool_call>?\n</think>\n\n{ONE}"
    async with speaker(text, reasoning_parser="think") as api:
        body = {"messages": HELLO, "tools": TOOLS, "n": 2, "logprobs": True}
        whole = await api.post(PATH, body)
        events = await api.events(PATH, body)
    for choice in whole["choices"]:
        assert choice["message"]["reasoning"] == "A <tool_call>?"
        assert choice["message"]["content"] is None
        assert choice["message"]["tool_calls"][0]["function"]["arguments"] == ROME
        assert len(choice["logprobs"]["content"]) == len(text.encode())
        streamed = [event["choices"][0] for event in events if event["choices"][0]["index"] == choice["index"]]
        assert sum(len((one["logprobs"] or {}).get("content", [])) for one in streamed) == len(text.encode())
        assert "".join(one["delta"].get("reasoning", "") for one in streamed) == "A <tool_call>?"


FLAT = [{"type": "function", **tool["function"]} for tool in TOOLS]
ODD = {"type": "object", "properties": {"x": {"type": "strange"}}}


@pytest.mark.parametrize(
    ("more", "param", "says"),
    [
        ({"tools": [{"type": "retrieval"}]}, "tools", "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools", "tools[0].function"),
        ({"tools": [function("two words")]}, "tools", "tools[0].function.name"),
        ({"tools": [function("a"), function("a")]}, "tools", "two functions named a"),
        ({"tools": [strict(function("a", x=1))]}, "tools", "properties"),
        ({"tools": [strict(having({"type": 1}))]}, "tools", "object"),
        ({"tools": [{"type": "function", "function": {"name": "a", "parameters": []}}]}, "tools", "parameters"),
        ({"tools": [strict(having({"required": 1}))]}, "tools", "list"),
        ({"tools": "weather"}, "tools", "tools"),
        ({"tool_choice": "required"}, "tool_choice", "needs tools"),
        ({"tool_choice": "sometimes", "tools": TOOLS}, "tool_choice", "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "x"}}, "tools": TOOLS}, "tool_choice", "named x"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"function": {}}]}]}, "messages", "tool_calls[0].function"),
    ],
)  # fmt: skip
async def test_invalid_tools_are_rejected_with_param(more: dict[str, Any], param: str, says: str) -> None:
    async with speaker("x") as api:
        error = (await api.post(PATH, {"messages": HELLO, **more}, 400))["error"]
        assert (error["type"], error["param"]) == ("invalid_request_error", param)
        assert says in error["message"]
        assert not api.engine.seen


@pytest.mark.parametrize(
    ("path", "body", "named"),
    [
        (
            PATH,
            {"messages": HELLO, "tools": [*TOOLS, strict(function("odd", x={"type": "strange"}))]},
            "function.parameters",
        ),
        (
            "/v1/responses",
            {"input": "a", "tools": [*FLAT, {**FLAT[0], "name": "odd", "parameters": ODD, "strict": True}]},
            "parameters",
        ),
    ],
)
async def test_uncompilable_tool_schema_is_rejected_by_path(path: str, body: dict[str, Any], named: str) -> None:
    """The error never names the grammar that is built from all tools."""
    async with speaker("x") as api:
        error = (await api.post(path, {**body, "tool_choice": "required"}, 400))["error"]
    assert error["message"] == f"tools[{len(body['tools']) - 1}].{named}: Invalid type: strange"
    assert error["param"] == "tools"


@pytest.mark.parametrize("choice", ["auto", "required", {"type": "function", "function": {"name": "weather"}}])
async def test_tools_are_described_in_system_message_if_template_lacks_tools(choice: Any) -> None:
    messages = [{"role": "system", "content": "Be brief."}, *HELLO]
    async with speaker(ONE, chat_template=CHATML) as api:
        response = await api.http.post(PATH, json={"messages": messages, "tools": TOOLS, "tool_choice": choice})
        assert "x-ignored-params" not in response.headers
        (result,) = response.json()["choices"]
        assert result["finish_reason"] == "tool_calls"
        assert prompt(api).startswith("system\nBe brief.\n\n"), "the caller's comes first"
        assert prompt(api).count("system\n") == 1
        for tool in TOOLS:
            assert json.dumps(tool["function"]["name"]) in prompt(api)
        turns = [*messages, result["message"], {"role": "tool", "tool_call_id": "x", "content": "20 degrees"}]
        await api.post(PATH, {"messages": turns, "tools": TOOLS})
        assert prompt(api).endswith(
            f'assistant\n<tool_call>\n{{"name": "weather", "arguments": {ROME}}}\n</tool_call>\n'
            "user\n<tool_response>\n20 degrees\n</tool_response>\nassistant\n"
        )
        await api.post(PATH, {"messages": HELLO, "tools": TOOLS, "tool_choice": "none"})
        assert "weather" not in prompt(api)


async def test_tools_are_rejected_with_flag_hint_when_parser_is_none() -> None:
    async with speaker(ONE, tool_call_parser="none") as api:
        with pytest.raises(BadRequestError, match="--tool-call-parser auto"):
            await api.openai.chat.completions.create(model="second", messages=HELLO, tools=TOOLS)
        await api.openai.chat.completions.create(model="second", messages=HELLO, tools=TOOLS, tool_choice="none")


@pytest.mark.few(1)
@pytest.mark.parametrize("length", [1, 12, 25])
async def test_forced_call_cut_before_name_leaves_content_empty(length: int) -> None:
    body = {"messages": HELLO, "tools": TOOLS, "tool_choice": "required", "max_tokens": length}
    async with speaker(ONE) as api:
        whole = await api.post(PATH, body)
        events = await api.events(PATH, body)
    (choice,) = whole["choices"]
    assert (choice["message"]["content"] or "", choice["finish_reason"]) == ("", "length")
    assert "tool_calls" not in choice["message"]
    assert not any(event["choices"][0]["delta"].get("content") for event in events)


async def test_strict_tools_have_grammar_with_tool_choice_auto() -> None:
    tools = [{"type": "function", "function": {**TOOLS[1]["function"], "strict": True}}]
    async with speaker("x") as api:
        response = await api.http.post(PATH, json={"messages": HELLO, "tools": tools})
        assert "x-ignored-params" not in response.headers
        assert response.json()["choices"][0]["message"]["content"] == "x"
        assert api.engine.seen[-1].params.grammar is not None
        await api.post(PATH, {"messages": HELLO, "tools": TOOLS})
        assert api.engine.seen[-1].params.grammar is None


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "choice",
    ["required", {"type": "function", "function": {"name": "weather"}}, {"function": {"name": "weather"}}],
    ids=["required", "named", "named without type"],
)
async def test_required_or_named_tool_choice_has_grammar(choice: Any) -> None:
    async with speaker(ONE) as api:
        whole = await api.post(PATH, {"messages": HELLO, "tools": TOOLS, "tool_choice": choice})
        assert whole["choices"][0]["finish_reason"] == "tool_calls"
        assert json.loads(whole["choices"][0]["message"]["tool_calls"][0]["function"]["arguments"])["city"] == "Rome"
        grammar = api.engine.seen[-1].params.grammar
        assert grammar is not None
        assert "weather" in grammar.text
        assert ("clock" in grammar.text) is (choice == "required")


async def test_response_format_grammar_combines_with_tools() -> None:
    schema = {"type": "object", "properties": {"mood": {"type": "string"}}}
    body = {
        "messages": HELLO,
        "tools": TOOLS,
        "response_format": {"type": "json_schema", "json_schema": {"schema": schema}},
    }
    async with speaker(ONE) as api:
        for choice in ("auto", "required", "none"):
            await api.post(PATH, {**body, "tool_choice": choice})
            text = api.engine.seen[-1].params.grammar.text
            assert ("weather" in text, "mood" in text) == (choice != "none", choice != "required"), choice
        refused = await api.post(PATH, {**body, "guided_json": {"type": "no"}, "response_format": None}, 400)
        assert refused["error"]["param"] == "guided_json"
        wrong = [strict(function("weather", city={"type": "no"}))]
        assert (await api.post(PATH, {**body, "tools": wrong}, 400))["error"]["param"] == "tools"


async def test_special_tokens_that_mark_calls_are_parsed_and_others_dropped() -> None:
    tokenizer = make_tokenizer(special=True, chat_template=HERMES)
    ids = tokenizer.encode(f"a[ARGS]b{ONE}[ARGS]")
    assert any(tokenizer.id_to_token(token_id) == "<tool_call>" for token_id in ids)
    async with serve_token_ids(tokenizer, ids) as http:
        answer = (await http.post(PATH, json={"messages": HELLO, "tools": TOOLS})).json()
        message = answer["choices"][0]["message"]
        assert (message["content"], message["tool_calls"][0]["function"]["arguments"]) == ("ab", ROME)
        answer = (await http.post(PATH, json={"messages": HELLO})).json()
        assert "<tool_call>" not in answer["choices"][0]["message"]["content"]


@pytest.mark.parametrize("name", ["minimind", "qwen2.5"])
async def test_real_tokenizers_and_templates_yield_calls_and_reasoning(name: str) -> None:
    tokenizer = Tokenizer.from_pretrained(shared("tokenizers") / name)
    thought = "hm é\n</think>\n\n" if name == "minimind" else ""
    async with serve_token_ids(tokenizer, tokenizer.encode(f"{thought}Ah.\n{TWO}", add_special_tokens=False)) as http:
        body = {"messages": HELLO, "tools": TOOLS, "chat_template_kwargs": {"open_thinking": True}}
        answer = (await http.post(PATH, json=body)).json()
    (choice,) = answer["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert (choice["message"]["content"], choice["message"].get("reasoning")) == ("Ah.", "hm é" if thought else None)
    calls = [call["function"] for call in choice["message"]["tool_calls"]]
    assert [(call["name"], call["arguments"]) for call in calls] == EXPECTED
    if thought:
        counted = answer["usage"]["completion_tokens_details"]["reasoning_tokens"]
        assert counted in range(1, len(tokenizer.encode(thought, add_special_tokens=False)) + 1)


@asynccontextmanager
async def serve_token_ids(tokenizer: Tokenizer, ids: list[int]) -> AsyncIterator[httpx.AsyncClient]:
    """A server whose model answers with these tokens."""
    engine = FakeEngine(scripted(ids, tokenizer.eos_token_ids[0]), eos=tokenizer.eos_token_ids, max_model_len=2048)
    config = ServerConfig(served_model_name=["m"])
    app = create_app(
        EngineClient(engine), ServedModelSpec(config, tokenizer, tokenizer.vocab_size, {}), launch_process=FORKED
    )
    async with open_http(app) as http:
        yield http


def folded(events: list[Any]) -> list[dict[str, Any]]:
    """Messages and finish reasons, as a client assembles them."""
    choices: dict[int, dict[str, Any]] = {}
    for event in events:
        (choice,) = event["choices"]
        known = choices.setdefault(choice["index"], {"content": "", "reasoning": "", "calls": []})
        assert known.get("finish_reason") is None
        delta = choice["delta"]
        assert delta.get("reasoning") == delta.get("reasoning_content")
        known["content"] += delta.get("content", "")
        known["reasoning"] += delta.get("reasoning", "")
        for call in delta.get("tool_calls", []):
            if "id" in call:
                known["calls"].append([call["function"]["name"], ""])
            known["calls"][call["index"]][1] += call["function"]["arguments"]
        known["tokens"] = known.get("tokens", 0) + len((choice["logprobs"] or {}).get("content") or [])
        known["finish_reason"], known["stop_reason"] = choice["finish_reason"], choice.get("stop_reason")
    return [choices[index] for index in sorted(choices)]


def flat(choice: dict[str, Any]) -> dict[str, Any]:
    message = choice["message"]
    calls = [[call["function"]["name"], call["function"]["arguments"]] for call in message.get("tool_calls", [])]
    return {
        "content": message["content"] or "",
        "reasoning": message.get("reasoning", ""),
        "calls": calls,
        "tokens": len((choice["logprobs"] or {}).get("content") or []),
        "finish_reason": choice["finish_reason"],
        "stop_reason": choice["stop_reason"],
    }


bodies = st.fixed_dictionaries(
    {
        "max_tokens": st.integers(1, 400),
        "n": st.integers(1, 2),
        "stop": st.none() | st.sampled_from(["Rome", "</", "clock", "é"]),
        "parallel_tool_calls": st.booleans(),
        "include_reasoning": st.booleans(),
        "logprobs": st.booleans(),
        "include_stop_str_in_output": st.booleans(),
    }
)


@slowly
@given(
    name=st.sampled_from(sorted(TWO_CALLS)),
    begin=st.sampled_from(["", "<think>", "\n<think>\né "]),
    parts=st.lists(st.sampled_from([*PARTS, "</think>", "\n\n", "ü"]), max_size=10),
    calls=st.booleans(),
    body=bodies,
    burst=st.integers(1, 5),
)
async def test_streamed_chat_assembles_to_whole_response(
    name: str, begin: str, parts: list[str], calls: bool, body: dict[str, Any], burst: int
) -> None:
    text = begin + "".join(parts) + (TWO_CALLS[name] if calls else "")
    engine = FakeEngine(scripted(text.encode(), EOS), eos=[EOS], max_model_len=2048, burst=burst)
    body = {"messages": HELLO, "tools": TOOLS, **body}
    async with open_api(engine, chat_template=HERMES, tool_call_parser=name, reasoning_parser="think") as api:
        whole = await api.post(PATH, body)
        events = await api.events(PATH, body)
    assert folded(events) == [flat(choice) for choice in whole["choices"]]
