"""Tool calls in code blocks, as Qwen2.5-Coder 1.5B writes them: which blocks are calls, and which stay text."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.server.formats.tools.tool_parser import ToolParser
from tests.server.api import NAME, open_api
from tests.server.fake import FakeEngine, scripted
from tests.server.formats.test_tools import CALLS, ROME, TOOLS, TWO_CALLS, Found, all_cuts, named, slowly
from tests.server.scripted import EOS, TEMPLATE

WEATHER = f'{{"name": "weather", "arguments": {ROME}}}'
CLOCK = '{"name": "clock", "arguments": {}}'
INDENTED = json.dumps({"name": "weather", "arguments": json.loads(ROME)}, indent=2)
BLOCKS: list[tuple[str, str, list[tuple[str, str]]]] = [
    (f"```json\n{WEATHER}\n```", "", CALLS[:1]),
    (f"```\n{WEATHER}\n```", "", CALLS[:1]),
    (f"Let me look.\n\n```json\n{WEATHER}\n```\nThat is it.", "Let me look.\nThat is it.", CALLS[:1]),
    (f"```json\n{WEATHER}\n```\n\n```json\n{CLOCK}\n```", "", CALLS),
    (f"```json\n[{WEATHER}, {CLOCK}]\n```", "", CALLS),
    (f"```json\n{WEATHER}\n{CLOCK}\n```\n", "", CALLS),
    (f'```json\n{{"name": "weather", "parameters": {ROME}}}\n```', "", CALLS[:1]),
    (f'```json\n{{"arguments": {ROME}, "name": "weather"}}\n```', "", CALLS[:1]),
    (f"```tool_call\n{WEATHER}\n```", "", CALLS[:1]),
    (f"  ```json\n  {WEATHER}\n  ```", "", CALLS[:1]),
    (f"```json\n{WEATHER}", "", CALLS[:1]),
    (f"```json\n{CLOCK}\n```\n<tool_call>\n{CLOCK}\n</tool_call>", "", [CALLS[1]] * 2),
]
TEXTS = [
    '```json\n{"name": "paint", "arguments": {}}\n```',
    '```json\n{"name": "weather", "city": "Rome"}\n```',
    '```json\n{"name": "weather"}\n```',
    '```json\n{"name": "weather", "arguments": "{}"}\n```',
    '```json\n{"city": "Rome"}\n```\nand more',
    f"```python\nprint({WEATHER})\n```",
    f"```python\nx = 1\n```\n{WEATHER}\n```\n",
    f"Write ```{WEATHER}``` so.",
    f"````\n```json\n{WEATHER}\n```\n````",
    WEATHER,
    "```",
    "``` `a",
    "```json\n[1, 2]\n```",
    "a ` b `` c",
]


def parse_pieces(pieces: list[str], name: str = "hermes", *, in_blocks: bool = True) -> Found:
    parser = ToolParser(named(name), TOOLS, in_blocks=in_blocks)
    result = Found()
    for position, piece in enumerate(pieces):
        content, deltas = parser.extract_tool_calls(piece, final=position == len(pieces) - 1)
        result.content += content
        for delta in deltas:
            if delta.name is not None:
                result.calls.append((delta.name, ""))
            called, arguments = result.calls[-1]
            result.calls[-1] = (called, arguments + delta.arguments)
    result.complete = parser.all_complete
    return result


@pytest.mark.parametrize(("text", "content", "calls"), BLOCKS)
def test_call_in_code_block_parses_same_at_any_split(text: str, content: str, calls: list[tuple[str, str]]) -> None:
    whole = parse_pieces([text])
    assert (whole.content, whole.calls, whole.complete) == (content, calls, True)
    for pieces in all_cuts(text):
        assert parse_pieces(pieces) == whole, pieces


def test_indented_json_call_keeps_arguments() -> None:
    ((name, arguments),) = parse_pieces(list(f"```json\n{INDENTED}\n```")).calls
    assert (name, json.loads(arguments)) == ("weather", json.loads(ROME))


@pytest.mark.parametrize("text", TEXTS)
def test_text_without_valid_call_block_stays_content(text: str) -> None:
    for pieces in ([text], list(text)):
        result = parse_pieces(pieces)
        assert (result.content, result.calls) == (text, [])


def test_code_block_stays_text_when_in_blocks_is_false() -> None:
    text = BLOCKS[0][0]
    assert parse_pieces([text], in_blocks=False).content == text


@pytest.mark.parametrize("name", TWO_CALLS)
def test_every_tool_format_parses_native_and_code_block_calls(name: str) -> None:
    assert parse_pieces([TWO_CALLS[name]], name).calls == CALLS
    text = f"See.\n```json\n{WEATHER}\n```"
    results = [parse_pieces(pieces, name) for pieces in ([text], list(text))]
    assert [(each.content, each.calls) for each in results] == [("See.", CALLS[:1])] * 2


def test_code_block_call_arguments_stream_incrementally() -> None:
    parser = ToolParser(named("hermes"), TOOLS, in_blocks=True)
    content, deltas = parser.extract_tool_calls(f"```json\n{WEATHER[: WEATHER.index('Ro') + 2]}")
    assert content == ""
    assert "".join(delta.arguments for delta in deltas) == '{"city": "Ro'
    content, _ = ToolParser(named("hermes"), TOOLS, in_blocks=True).extract_tool_calls('```json\n{"city": "Rome", ')
    assert content == '```json\n{"city": "Rome",', "an object that begins otherwise is not held back"


PARTS = (
    "```",
    "`",
    "\n",
    "json",
    "[",
    "]",
    ",",
    " ",
    "text",
    WEATHER,
    CLOCK,
    '{"name": "',
    "<tool_call>",
    "</tool_call>",
)


@slowly
@given(parts=st.lists(st.sampled_from(PARTS), max_size=12), lengths=st.lists(st.integers(1, 5), min_size=1))
def test_random_text_with_code_blocks_parses_same_in_pieces(parts: list[str], lengths: list[int]) -> None:
    text, pieces, place = "".join(parts), list[str](), 0
    while place < len(text):
        length = lengths[len(pieces) % len(lengths)]
        pieces.append(text[place : place + length])
        place += length
    assert parse_pieces([*pieces, ""]) == parse_pieces([text])


CHAT = "/v1/chat/completions"
ASKED: dict[str, Any] = {
    "messages": [{"role": "user", "content": "The weather?"}],
    "tools": [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}],
}


def engine(text: str) -> FakeEngine:
    return FakeEngine(scripted(text.encode(), EOS), eos=[EOS], max_model_len=4096)


async def test_api_returns_code_block_as_tool_call_whole_and_streamed() -> None:
    text = f"Let me look.\n```json\n{WEATHER}\n```"
    async with open_api(engine(text), chat_template=TEMPLATE) as api:
        choice = (await api.post(CHAT, ASKED))["choices"][0]
        message = choice["message"]
        assert (message["content"], choice["finish_reason"]) == ("Let me look.", "tool_calls")
        (call,) = message["tool_calls"]
        assert (call["function"]["name"], call["function"]["arguments"]) == ("weather", ROME)
        content, arguments, reasons = "", "", []
        stream = await api.openai.chat.completions.create(model=NAME, stream=True, **ASKED)
        async for chunk in stream:
            for one in chunk.choices:
                content += one.delta.content or ""
                arguments += "".join(each.function.arguments or "" for each in one.delta.tool_calls or [])
                reasons += [one.finish_reason] if one.finish_reason else []
        assert (content, arguments, reasons) == ("Let me look.", ROME, ["tool_calls"])
        body = {"max_tokens": 200, "messages": ASKED["messages"]}
        tools = [{"name": "weather", "input_schema": {"type": "object"}}]
        answer = await api.post("/v1/messages", {**body, "model": NAME, "tools": tools})
        assert [block["type"] for block in answer["content"]] == ["text", "tool_use"]
        for other in (
            {"tool_choice": "none"},
            {"tools": [{"type": "function", "function": {"name": "paint", "parameters": {"type": "object"}}}]},
        ):
            message = (await api.post(CHAT, {**ASKED, **other}))["choices"][0]["message"]
            assert (message["content"], message.get("tool_calls") or []) == (text, [])


async def test_code_block_stays_text_if_strict_or_template_lacks_tools() -> None:
    text = f"```json\n{WEATHER}\n```"
    async with open_api(engine(text), chat_template=TEMPLATE, strict_tool_calls=True) as api:
        message = (await api.post(CHAT, ASKED))["choices"][0]["message"]
        assert (message["content"], message.get("tool_calls") or []) == (text, [])
    async with open_api(engine(text)) as api:
        message = (await api.post(CHAT, ASKED))["choices"][0]["message"]
        assert (message["content"], message.get("tool_calls") or []) == (text, [])
