"""Answers that users of agents reported, through every API with tool calls, streamed and whole."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.server.anthropic import folded as folded_message
from tests.server.api import NAME, Api, open_api
from tests.server.openai_responses import folded as folded_response
from tests.server.say import saying_engine
from tests.texts import shared

MAYBE = {"anyOf": [{"type": "string"}, {"type": "null"}]}
PARAMETERS = {"type": "object", "properties": {"p": MAYBE, "old": MAYBE, "zip": MAYBE, "body": MAYBE}}
QWEN35, HERMES, LLAMA = "Qwen3.5-4B", "Qwen-Qwen3-0.6B", "meta-llama-Llama-3.2-3B-Instruct"
XML = "<tool_call>\n<function=t>\n{}</function>\n</tool_call>"
PARAMETER = "<parameter={}>\n{}\n</parameter>\n"
EDIT = "".join(PARAMETER.format(*one) for one in (("old", "    return x"), ("zip", "90210"), ("body", '{"a": 1}')))
EDITED = {"old": "    return x", "zip": "90210", "body": '{"a": 1}'}
X = {"p": "x"}
Calls = list[tuple[str, dict[str, Any]]]
CASES: dict[str, tuple[str, bool, str, str, str, Calls]] = {
    # smg#1841, mlxcel#1336, vllm#36032, vllm#48846
    "nullable strings": (QWEN35, False, XML.format(EDIT), "", "", [("t", EDITED)]),
    # ai-sdk-tool-call-middleware#298
    "a raw newline": (
        HERMES, False, '<tool_call>{"name": "t", "arguments": {"p": "a\nb"}}</tool_call>', "", "",
        [("t", {"p": "a\nb"})],
    ),
    # omlx#1931, openclaw#141323
    "a bad escape": (
        HERMES, False, '<tool_call>{"name": "t", "arguments": {"p": "\\d"}}</tool_call>', "", "",
        [("t", {"p": "\\d"})],
    ),
    "brackets left open at the end": (
        HERMES, False, '<tool_call>{"name": "t", "arguments": {"p": "x"', "", "", [("t", X)],
    ),
    # ollama#16686, ollama#18530
    "no opener": (
        QWEN35, False, "I will look.\n\n" + XML.format(PARAMETER.format("p", "x"))[12:], "", "I will look.", [("t", X)]
    ),
    # vllm#35687
    "no end of thinking": (
        QWEN35, True, "I will call.\n\n" + XML.format(PARAMETER.format("p", "x")), "I will call.", "", [("t", X)]
    ),
    # unsloth#7426, vllm#25108
    "two calls of Llama 3": (
        LLAMA, False, '{"name": "t", "parameters": {"p": "x"}}; {"name": "u", "parameters": {"p": "y"}}', "", "",
        [("t", X), ("u", {"p": "y"})],
    ),
}  # fmt: skip


def template(name: str) -> str:
    return (shared("templates") / f"{name}.jinja").read_text(encoding="utf-8")


def user_message(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": f"SAY[[{text}]]END"}]


def parse_blocks(parts: list[dict[str, Any]]) -> tuple[str, str, Calls]:
    """Return reasoning, text and calls of Anthropic's content blocks."""
    texts = {kind: "".join(part[kind] for part in parts if part["type"] == kind) for kind in ("thinking", "text")}
    calls = [(part["name"], part["input"]) for part in parts if part["type"] == "tool_use"]
    return texts["thinking"], texts["text"], calls


def parse_items(output: list[dict[str, Any]]) -> tuple[str, str, Calls]:
    texts = {
        kind: "".join(part["text"] for item in output if item["type"] == kind for part in item["content"])
        for kind in ("reasoning", "message")
    }
    calls = [(item["name"], json.loads(item["arguments"])) for item in output if item["type"] == "function_call"]
    return texts["reasoning"], texts["message"], calls


def parse_ollama_lines(lines: list[dict[str, Any]]) -> tuple[str, str, Calls]:
    messages = [line["message"] for line in lines]
    calls = [call["function"] for message in messages for call in message.get("tool_calls") or []]
    reasoning = "".join(message.get("thinking", "") for message in messages)
    named_calls = [(call["name"], call["arguments"]) for call in calls]
    return reasoning, "".join(message["content"] for message in messages), named_calls


async def chat(api: Api, text: str, thinks: bool) -> list[tuple[str, str, Calls]]:
    functions = [{"type": "function", "function": {"name": name, "parameters": PARAMETERS}} for name in ("t", "u")]
    body = {"messages": user_message(text), "tools": functions, "chat_template_kwargs": {"enable_thinking": thinks}}
    message = (await api.post("/v1/chat/completions", body))["choices"][0]
    assert message["finish_reason"] == "tool_calls"
    message = message["message"]
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message["tool_calls"]]
    deltas = [event["choices"][0]["delta"] for event in await api.events("/v1/chat/completions", body)]
    streamed: dict[int, list[str]] = {}
    for call in (call for delta in deltas for call in delta.get("tool_calls") or []):
        known = streamed.setdefault(call["index"], [call["function"].get("name", ""), ""])
        known[1] += call["function"]["arguments"]
    texts = ["".join(delta.get(name) or "" for delta in deltas) for name in ("reasoning", "content")]
    assert [tuple(call) for call in streamed.values()] == calls
    assert texts == [message.get("reasoning", ""), message["content"] or ""]
    return [(texts[0], texts[1], [(name, json.loads(arguments)) for name, arguments in calls])]


async def messages(api: Api, text: str, thinks: bool) -> list[tuple[str, str, Calls]]:
    tools = [{"name": name, "input_schema": PARAMETERS} for name in ("t", "u")]
    body: dict[str, Any] = {"model": NAME, "max_tokens": 500, "messages": user_message(text), "tools": tools}
    body["thinking"] = {"type": "adaptive" if thinks else "disabled"}
    whole = await api.post("/v1/messages", body)
    assert whole["stop_reason"] == "tool_use"
    response = await api.http.post("/v1/messages", json={**body, "stream": True})
    events = [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: ")]
    return [parse_blocks(whole["content"]), parse_blocks(folded_message(events)["content"])]


async def responses(api: Api, text: str, thinks: bool) -> list[tuple[str, str, Calls]]:
    tools = [{"type": "function", "name": name, "parameters": PARAMETERS, "strict": False} for name in ("t", "u")]
    body = {"model": NAME, "input": user_message(text), "tools": tools, "store": False}
    body["reasoning"] = {"effort": "medium" if thinks else "none"}
    whole = await api.post("/v1/responses", body)
    response = await api.http.post("/v1/responses", json={**body, "stream": True})
    events = [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: {")]
    return [parse_items(whole["output"]), parse_items(folded_response(events)["output"])]


async def ollama(api: Api, text: str, thinks: bool) -> list[tuple[str, str, Calls]]:
    functions = [{"type": "function", "function": {"name": name, "parameters": PARAMETERS}} for name in ("t", "u")]
    body = {"model": NAME, "messages": user_message(text), "tools": functions, "think": thinks}
    whole = await api.post("/api/chat", {**body, "stream": False})
    lines = (await api.http.post("/api/chat", json=body)).text.splitlines()
    return [parse_ollama_lines([whole]), parse_ollama_lines([json.loads(line) for line in lines])]


@pytest.mark.few(4)
@pytest.mark.parametrize("ask", [chat, messages, responses, ollama])
@pytest.mark.parametrize("case", CASES)
async def test_reported_answer_parses_as_intended_in_every_api(case: str, ask: Any) -> None:
    name, thinks, text, reasoning, content, calls = CASES[case]
    async with open_api(saying_engine(), chat_template=template(name)) as api:
        for parsed in await ask(api, text, thinks):
            assert parsed == (reasoning, content, calls)


@pytest.mark.parametrize(
    ("number", "name"), [("01", QWEN35), ("08", HERMES), ("09", QWEN35), ("10", QWEN35), ("15", QWEN35), ("18", LLAMA)]
)
async def test_reported_request_yields_expected_calls(number: str, name: str) -> None:
    (path,) = shared("cases").glob(f"{number}_*.json")
    body = json.loads(path.read_text(encoding="utf-8"))
    async with open_api(saying_engine(), chat_template=template(name), served_model_name=["say"]) as api:
        if number == "08":
            (call,) = (await api.post("/v1/messages", body))["content"]
            assert call["input"] == {"p": "a\nb"}
            return
        choice = (await api.post("/v1/chat/completions", body))["choices"][0]
    calls = [json.loads(call["function"]["arguments"]) for call in choice["message"].get("tool_calls") or []]
    expected = {"01": [EDITED], "09": [X], "10": [X], "15": [], "18": [X, {"p": "y"}]}
    assert calls == expected[number]
    assert choice["finish_reason"] == ("tool_calls" if calls else "stop")
    if number == "15":
        assert choice["message"]["content"] == "Answer: two."


async def test_string_arguments_are_wrapped_where_api_needs_object() -> None:
    text = '<tool_call>\n{"name": "t", "arguments": "Rome, please"}\n</tool_call>'
    tools = [{"name": "t", "input_schema": PARAMETERS}]
    body = {"model": NAME, "max_tokens": 500, "messages": user_message(text), "tools": tools}
    async with open_api(saying_engine(), chat_template=template(HERMES)) as api:
        parsed = [parse_blocks((await api.post("/v1/messages", body))["content"]), *await ollama(api, text, False)]
    assert [calls for _, _, calls in parsed] == [[("t", {"arguments": "Rome, please"})]] * 3


@pytest.mark.parametrize("text", ['{"p": "x', '{"p": "x"', '{"p": "x\\'])
async def test_arguments_cut_by_max_tokens_are_prefix(text: str) -> None:
    said_text = '<tool_call>{"name": "t", "arguments": ' + text
    functions = [{"type": "function", "function": {"name": "t", "parameters": PARAMETERS}}]
    body = {"messages": user_message(said_text + "yyy"), "tools": functions, "max_tokens": len(said_text)}
    async with open_api(saying_engine(), chat_template=template(HERMES)) as api:
        choice = (await api.post("/v1/chat/completions", body))["choices"][0]
    assert choice["finish_reason"] == "length"
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] == text.rstrip("\\")
