"""Tool parsers find the same calls and content, however the text is split."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, get_args

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from quire.server.config import ToolCallParser
from quire.server.formats.tools.named_formats import TOOL_FORMATS, find_tool_format
from quire.server.formats.tools.tool_parser import Tool, ToolFormat, ToolParser
from tests.texts import real_tokenizers, shared

TOOLS = {
    name: Tool(name, {"type": "object", "properties": properties})
    for name, properties in {
        "weather": {"city": {"type": "string"}, "days": {"type": "integer"}, "opts": {"type": "object"}},
        "clock": {},
        "ns.f-1": {"x": {}},
    }.items()
}
ROME = '{"city": "Rome", "days": 2}'
CALLS = [("weather", ROME), ("clock", "{}")]
DS_BEGIN, DS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, SEP, END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
TWO_CALLS = {
    "hermes": f'<tool_call>\n{{"name": "weather", "arguments": {ROME}}}\n</tool_call>\n'
    '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>',
    "llama3_json": f'{{"name": "weather", "parameters": {ROME}}}; {{"name": "clock", "parameters": {{}}}}',
    "granite": f'<|tool_call|>[{{"name": "weather", "arguments": {ROME}}}, {{"name": "clock", "arguments": {{}}}}]',
    "openai": f" to=functions.weather<|channel|>commentary json<|message|>{ROME}"
    "<|start|>assistant to=functions.clock<|channel|>commentary json<|message|>{}",
    "pythonic": "[weather(city='Rome', days=2), clock()]",
    "mistral": f'[TOOL_CALLS][{{"name": "weather", "arguments": {ROME}}}, {{"name": "clock", "arguments": {{}}}}]',
    "mistral_args": f"[TOOL_CALLS]weather[ARGS]{ROME}[TOOL_CALLS]clock[ARGS]{{}}",
    "deepseek_v3": f"{DS_BEGIN}{CALL}function{SEP}weather\n```json\n{ROME}\n```{END}\n"
    f"{CALL}function{SEP}clock\n```json\n{{}}\n```{END}{DS_END}",
    "deepseek_v31": f"{DS_BEGIN}{CALL}weather{SEP}{ROME}{END}{CALL}clock{SEP}{{}}{END}{DS_END}",
    "qwen3_coder": "<tool_call>\n<function=weather>\n<parameter=city>\nRome\n</parameter>\n"
    "<parameter=days>\n2\n</parameter>\n</function>\n</tool_call>\n"
    "<tool_call>\n<function=clock>\n</function>\n</tool_call>",
    "seed_oss": "<seed:tool_call>\n<function=weather>\n<parameter=city>Rome</parameter>\n"
    "<parameter=days>2</parameter>\n</function>\n</seed:tool_call>"
    "<seed:tool_call><function=clock></function></seed:tool_call>",
}
MORE = {
    "hermes": [
        ('Hi <\n\n<tool_call>{"arguments": {"x": 1}, "name": "f"}</tool_call>\nbye', "Hi <\nbye", [("f", '{"x": 1}')]),
        ('<tool_call>{"name": "f", "arguments": "{\\"x\\": 1}"}</tool_call>', "", [("f", '{"x": 1}')]),
        ('<tool_call>{"name": "f"}</tool_call>', "", [("f", "{}")]),
        ('<tool_call>{"name": "f", "arguments": {"a": "</tool_call>"}}', "", [("f", '{"a": "</tool_call>"}')]),
        ('<tool_call>{"name": "f", "arguments": {}}', "", [("f", "{}")]),
        ('\n<tool_call>{"name": "f", "arguments": {}}</tool_call>\n', "", [("f", "{}")]),
        ('<tool_call>{"name": "f", "arguments": {}</tool_call>', "", [("f", "{}")]),
        ('<tool_call>{"type": "function", "name": "f", "parameters": {"a": [{}]}}', "", [("f", '{"a": [{}]}')]),
        ("a <tool_call> b", "a <tool_call> b", []),
        ("a <tool_call>{1}</tool_call>", "a <tool_call>{1}</tool_call>", []),
        ('<tool_call>{"name": 1, "arguments": {}}', '<tool_call>{"name": 1, "arguments": {}}', []),
        ('<tool_call>{"name": "\\ud800", "arguments": {}}', '<tool_call>{"name": "\\ud800", "arguments": {}}', []),
        ("  a < <tool <tool_cal \n", "  a < <tool <tool_cal \n", []),
        ('x\n<tool_call>{"name"', 'x\n<tool_call>{"name"', []),
        (" \n", " \n", []),
    ],
    "llama3_json": [
        (f'<|python_tag|>{{"name": "weather", "parameters": {ROME}}}', "", [("weather", ROME)]),
        ('{"name": "stranger", "parameters": {}}', '{"name": "stranger", "parameters": {}}', []),
        ('<|python_start|>{"name": "clock", "parameters": {}}<|python_end|>', "", [("clock", "{}")]),
        ('{"parameters": {}, "name": "clock"}', "", [("clock", "{}")]),
        ('{"answer": 42}', '{"answer": 42}', []),
        ('{"x": 1, "name": "clock", "parameters": {}}', '{"x": 1, "name": "clock", "parameters": {}}', []),
        ('{"answer": 42', '{"answer": 42', []),
        ('<|python_tag|>weather.call(city="Rome")', '<|python_tag|>weather.call(city="Rome")', []),
        ('{"name": "clock", "parameters": {}}; and more', "; and more", [("clock", "{}")]),
        ('Sure: {"name": "clock", "parameters": {}}', 'Sure: {"name": "clock", "parameters": {}}', []),
        ('{"type": "function", "name": "clock", "parameters": {}}', "", [("clock", "{}")]),
    ],
    "pythonic": [
        (
            """[ns.f-1(x=[1, -2.5, True, None, {"a": 'é)"'}], y=null), clock()] ok""",
            " ok",
            [("ns.f-1", '{"x": [1, -2.5, true, null, {"a": "é)\\""}], "y": null}'), ("clock", "{}")],
        ),
        ("<|tool_call_start|>[clock()]<|tool_call_end|>", "", [("clock", "{}")]),
        ("Yes.<|python_start|>[clock()]<|python_end|>", "Yes.", [("clock", "{}")]),
        ("[1] says (so)", "[1] says (so)", []),
        ("[stranger(a=1)]", "[stranger(a=1)]", []),
        ("[weather(city=open('x'))]", "[weather(city=open('x'))]", []),
        ("[weather('Rome')]", "[weather('Rome')]", []),
        ("[weather(**{'city': 1})]", "[weather(**{'city': 1})]", []),
        ("[weather(city='Ro", "[weather(city='Ro", []),
        (r"[weather(city='\ud800')]", "", [("weather", r'{"city": "\ud800"}')]),
    ],
    "mistral": [
        (f"[TOOL_CALLS]weather[CALL_ID]abc123456[ARGS]{ROME}", "", [("weather", ROME)]),
        (f"[TOOL_CALLS]weather{ROME}", "", [("weather", ROME)]),
        ("[TOOL_CALLS] what now?", "[TOOL_CALLS] what now?", []),
        ("[TOOL_CALLS]two words{}", "[TOOL_CALLS]two words{}", []),
        ("[TOOL_CALLS][1]", "[TOOL_CALLS][1]", []),
        (f"[TOOL_CALLS]{'n' * 300}{{}}", f"[TOOL_CALLS]{'n' * 300}{{}}", []),
    ],
    "deepseek_v3": [
        (f"{DS_BEGIN}nothing", f"{DS_BEGIN}nothing", []),
        (f"{DS_BEGIN}{CALL}function{SEP}two words{{", f"{DS_BEGIN}{CALL}function{SEP}two words{{", []),
        (f"Let me see.\n{DS_BEGIN}{CALL}clock{SEP}{{}}{END}", "Let me see.", [("clock", "{}")]),
    ],
    "qwen3_coder": [
        (
            '<function=weather><parameter=city>\n"R"\n\\ é </parameter>x<parameter=opts>1</parameter></function>',
            "x<parameter=opts>1</parameter></function>",
            [("weather", '{"city": "\\"R\\"\\n\\\\ é "')],
        ),
        (
            "<tool_call>\n<function=ns.f-1>\n<parameter=x>\nTrue\n</parameter>\n<parameter=y>\nNaN\n</parameter>\n</tool_call>",
            "",
            [("ns.f-1", '{"x": true, "y": "NaN"}')],
        ),
        ("<tool_call>\nno function", "<tool_call>\nno function", []),
        ("<function=two words>", "<function=two words>", []),
    ],
}  # fmt: skip
CASES = [(name, text, "", CALLS) for name, text in TWO_CALLS.items()]
CASES += [(name, *case) for name, cases in MORE.items() for case in cases]

slowly = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
"""Hypothesis takes seconds for its first text if another process has the processor."""


@dataclass
class Found:
    """Deltas as a client assembles them."""

    content: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)
    complete: bool = False


def read(format: ToolFormat, pieces: Sequence[str], most_calls: int | None = None) -> Found:
    parser = ToolParser(format, TOOLS, most_calls)
    result = Found()
    ids = set()
    for position, piece in enumerate(pieces):
        content, deltas = parser.extract_tool_calls(piece, final=position == len(pieces) - 1)
        result.content += content
        for delta in deltas:
            if delta.name is not None:
                assert delta.index == len(result.calls), "calls come in order"
                assert delta.id
                assert delta.arguments == ""
                ids.add(delta.id)
                result.calls.append((delta.name, ""))
            assert delta.index == len(result.calls) - 1
            name, arguments = result.calls[-1]
            result.calls[-1] = (name, arguments + delta.arguments)
    assert len(ids) == len(result.calls)
    result.complete = parser.all_complete
    return result


def named(name: str) -> ToolFormat:
    format = find_tool_format(name, "")
    assert format is not None
    return format


def all_cuts(text: str) -> list[list[str]]:
    cuts = [[text[:place], text[place:]] for place in range(len(text) + 1)]
    return [*cuts, list(text), [*text, ""], [text, ""]]


@pytest.mark.parametrize(("name", "text", "content", "calls"), CASES)
def test_tool_calls_parse_same_at_any_split(name: str, text: str, content: str, calls: list[tuple[str, str]]) -> None:
    whole = read(named(name), [text])
    assert (whole.content, whole.calls) == (content, calls)
    for pieces in all_cuts(text):
        assert read(named(name), pieces) == whole, pieces


@pytest.mark.parametrize("name", TWO_CALLS)
def test_truncated_answer_yields_argument_prefix_or_unchanged_text(name: str) -> None:
    text = TWO_CALLS[name]
    for length in range(len(text)):
        result = read(named(name), [text[:length]])
        assert CALLS[0][1].startswith(result.calls[0][1] if result.calls else ""), "arguments so far are a beginning"
        if result.complete:
            assert [json.loads(arguments) for _, arguments in result.calls]
        if not result.calls:
            assert result.content.strip() == text[:length].strip()


@pytest.mark.parametrize("name", TWO_CALLS)
def test_call_arguments_stream_incrementally(name: str) -> None:
    if name == "pythonic":
        pytest.skip("read call by call: Python's literals are not JSON's")
    text = TWO_CALLS[name]
    parser = ToolParser(named(name), TOOLS)
    _, deltas = parser.extract_tool_calls(text[: text.index("Ro") + 2])
    assert [delta.name for delta in deltas if delta.name] == ["weather"]
    assert "".join(delta.arguments for delta in deltas) == '{"city": "Ro'


@pytest.mark.parametrize("name", TWO_CALLS)
def test_parser_keeps_only_first_call_when_most_calls_is_one(name: str) -> None:
    result = read(named(name), list(TWO_CALLS[name]), most_calls=1)
    assert (result.content, result.calls, result.complete) == ("", CALLS[:1], True)


def test_call_ids_have_form_required_by_template() -> None:
    assert named("hermes").derive_call_id("a/1").startswith("call_")
    assert len(named("mistral").derive_call_id("a/1")) == 9
    assert named("mistral_args").derive_call_id("a/1").isalnum()


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
keys = st.text("abc_xyz", min_size=1, max_size=6)
arguments = st.dictionaries(keys, values, max_size=4)


def dumped(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def write_calls(name: str, calls: list[tuple[str, dict[str, Any]]]) -> str:
    """Write calls as a model of this format does."""
    match name:
        case "hermes":
            return "\n".join(
                f'<tool_call>\n{{"name": "{f}", "arguments": {dumped(a)}}}\n</tool_call>' for f, a in calls
            )
        case "llama3_json":
            return "; ".join(f'{{"name": "{f}", "parameters": {dumped(a)}}}' for f, a in calls)
        case "pythonic":
            written = [f"{f}({', '.join(f'{key}={value!r}' for key, value in a.items())})" for f, a in calls]
            return f"[{', '.join(written)}]"
        case "openai":
            head = "<|start|>assistant<|channel|>commentary to=functions.{} <|constrain|>json<|message|>"
            return "".join(head.format(f) + dumped(a) for f, a in calls).removeprefix("<|start|>assistant")
        case "mistral" | "granite":
            written = [f'{{"name": "{f}", "arguments": {dumped(a)}}}' for f, a in calls]
            return f"{'[TOOL_CALLS]' if name == 'mistral' else '<|tool_call|>'}[{', '.join(written)}]"
        case "mistral_args":
            return "".join(f"[TOOL_CALLS]{f}[ARGS]{dumped(a)}" for f, a in calls)
        case "deepseek_v3":
            body = "\n".join(f"{CALL}function{SEP}{f}\n```json\n{dumped(a)}\n```{END}" for f, a in calls)
            return DS_BEGIN + body + DS_END
        case "deepseek_v31":
            return DS_BEGIN + "".join(f"{CALL}{f}{SEP}{dumped(a)}{END}" for f, a in calls) + DS_END
    raise AssertionError(name)


@slowly
@given(
    name=st.sampled_from(sorted(TWO_CALLS.keys() - {"qwen3_coder", "seed_oss"})),
    calls=st.lists(st.tuples(st.sampled_from(sorted(TOOLS)), arguments), min_size=1, max_size=3),
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=8),
)
def test_random_arguments_round_trip(name: str, calls: list[tuple[str, dict[str, Any]]], lengths: list[int]) -> None:
    text = write_calls(name, calls)
    result = read(named(name), in_pieces(text, lengths))
    assert result.content == ""
    assert [(f, json.loads(a)) for f, a in result.calls] == calls
    assert result.complete
    assert read(named(name), [text]) == result


@slowly
@given(
    city=st.text(),
    days=st.integers(),
    opts=st.dictionaries(keys, values),
    lengths=st.lists(st.integers(1, 9), min_size=1),
)
def test_random_arguments_round_trip_as_xml(city: str, days: int, opts: dict[str, Any], lengths: list[int]) -> None:
    expected = {"city": city, "days": days, "opts": opts}
    parameters = "".join(
        f"<parameter={key}>\n{value if isinstance(value, str) else dumped(value)}\n</parameter>\n"
        for key, value in expected.items()
    )
    text = f"<tool_call>\n<function=weather>\n{parameters}</function>\n</tool_call>"
    result = read(named("qwen3_coder"), in_pieces(text, lengths))
    assert [(f, json.loads(a)) for f, a in result.calls] == [("weather", expected)]
    assert read(named("qwen3_coder"), [text]) == result


PARTS = [
    *"{}[]()=,\na1é",
    '"',
    "weather",
    "clock",
    '{"name": "clock", "arguments": {',
    DS_BEGIN,
    CALL,
    SEP,
    END,
    "```json\n",
]
PARTS += ["<tool_call>", "</tool_call>", "<function=clock>", "<parameter=a>", "</parameter>", "</function>"]
PARTS += ["[TOOL_CALLS]", "[ARGS]", "<|python_tag|>"]


@slowly
@given(
    name=st.sampled_from(sorted(TWO_CALLS)),
    parts=st.lists(st.sampled_from(PARTS), max_size=14),
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=8),
)
def test_random_text_with_call_tags_parses_same_in_pieces(name: str, parts: list[str], lengths: list[int]) -> None:
    text = "".join(parts)
    whole = read(named(name), [text])
    assert read(named(name), in_pieces(text, lengths)) == whole
    if not whole.calls:
        assert whole.content == text


def in_pieces(text: str, lengths: Sequence[int]) -> list[str]:
    pieces = []
    start = turn = 0
    while start < len(text):
        length = lengths[turn % len(lengths)]
        pieces.append(text[start : start + length])
        start, turn = start + length, turn + 1
    return pieces or [""]


SPOKEN = {
    "NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use": "hermes",
    "NousResearch-Hermes-3-Llama-3.1-8B-tool_use": "hermes",
    "Qwen-Qwen2.5-7B-Instruct": "hermes",
    "Qwen-Qwen3-0.6B": "hermes",
    "Qwen-QwQ-32B": "hermes",
    "ibm-granite-granite-4.1": "hermes",
    "Qwen3.5-4B": "qwen3_coder",
    "StepFun3.5-Flash": "qwen3_coder",
    "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": "qwen3_coder",
    "ByteDance-Seed-OSS": "seed_oss",
    "meta-llama-Llama-3.1-8B-Instruct": "llama3_json",
    "meta-llama-Llama-3.2-3B-Instruct": "llama3_json",
    "LFM2.5-8B-A1B": "pythonic",
    "mistralai-Mistral-Nemo-Instruct-2407": "mistral",
    "mistralai-Ministral-3-14B-Reasoning-2512": "mistral_args",
    "unsloth-mistral-Devstral-Small-2507": "mistral_args",
    "llama-cpp-deepseek-r1": "deepseek_v3",
    "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B": "deepseek_v3",
    "deepseek-ai-DeepSeek-V3.1": "deepseek_v31",
    "GLM-4.7-Flash": None,
    "google-gemma-2-2b-it": None,
    "microsoft-Phi-3.5-mini-instruct": None,
    "unsloth-Apriel-1.5": None,
}


@pytest.mark.parametrize(("template", "name"), SPOKEN.items())
def test_find_tool_format_detects_format_of_published_template(template: str, name: str | None) -> None:
    text = (shared("templates") / f"{template}.jinja").read_text(encoding="utf-8")
    assert find_tool_format("auto", text) is (None if name is None else named(name))
    assert find_tool_format("none", text) is None


def test_find_tool_format_detects_format_of_real_tokenizer() -> None:
    formats = {
        one.name: find_tool_format("auto", "\n".join(one.tokenizer.chat_templates.values()))
        for one in real_tokenizers()
    }
    if not formats:
        pytest.skip("../shared/tokenizers is not there")
    assert formats["minimind"] is named("hermes")
    assert formats["tinyllama"] is None


def test_tool_call_parser_choices_equal_known_formats() -> None:
    assert {row.name for row in TOOL_FORMATS} == set(get_args(ToolCallParser)) - {"auto", "none"} == TWO_CALLS.keys()


def test_non_call_json_streams_without_delay() -> None:
    parser = ToolParser(named("llama3_json"), TOOLS)
    assert parser.extract_tool_calls('{"answer": "for')[0] == '{"answer": "for'
