"""Tool calls with missing marks: the tag around them, the end of the reasoning before them, or the separator between
them.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from quire.server.formats.call_forms.call_form import CallForm
from quire.server.formats.message_parser import AssistantMessageParser
from quire.server.formats.tools.call_trial import CallTrial
from quire.server.formats.tools.named_formats import find_tool_format
from tests.server.formats.proof import Call, Read, Subject, read
from tests.server.formats.templates import each, template
from tests.server.formats.test_derived import PATHS, SHOWING, form_of, subject
from tests.server.formats.test_tools import all_cuts

CALL = "<tool_call>\n<function=clock>\n<parameter=city>\nx\n</parameter>\n</function>\n</tool_call>"
BARE = CALL.removeprefix("<tool_call>\n")
STRANGER = CALL.replace("clock", "stranger")
ONE = [Call("clock", {"city": "x"})]
QWEN = "Qwen3.5-4B"


def parse_at_every_split(name: str, text: str, begun: bool | None) -> Read:
    """Parse `text`, and assert that every split of it gives the same message."""
    format = replace(subject(name).message_format(), starts_in_thinking=begun)
    whole = read(format, [text])
    for pieces in all_cuts(text):
        assert read(format, pieces) == whole, pieces
    return whole


@pytest.mark.parametrize(
    ("text", "reasoning", "content", "made"),
    [
        ("I will call.\n\n" + CALL, "I will call.", "", ONE),
        (CALL + "\n", "", "", ONE),
        ("a\n" + CALL + "\n" + CALL + "\n", "a", "", ONE + ONE),
        ("a " + CALL + " hm " + CALL, "a " + CALL + " hm", "", ONE),
        ("Use <tool_call> tags. " + CALL, "Use <tool_call> tags.", "", ONE),
        ("a " + BARE, "a", "", ONE),
        ("a " + CALL + "\n</think>\n\n", "a", "", ONE),
        ("a " + CALL.removesuffix("\n</tool_call>"), "a", "", ONE),
        ("a " + CALL + " hm", "a " + CALL + " hm", "", []),
        ("a " + CALL + "</think>\n\nDone.", "a " + CALL, "Done.", []),
        ("a " + CALL + "</think>\n\n" + CALL, "a " + CALL, "", ONE),
        ("a " + STRANGER, "a " + STRANGER, "", []),
        ("a " + CALL + "\n" + STRANGER, "a " + CALL + "\n" + STRANGER, "", []),
        ("a " + CALL[:-40], "a " + CALL[:-40], "", []),
        ("Write `<tool_call>`", "Write `<tool_call>`", "", []),
    ],
)
def test_only_calls_at_end_of_reasoning_are_parsed(text: str, reasoning: str, content: str, made: list[Call]) -> None:
    """vllm#35687, vllm#39056, vllm#55759. Calls that a model writes about while it thinks must stay reasoning:
    renderers#78 and lmstudio-bug-tracker#1592 took them for calls.
    """
    assert parse_at_every_split(QWEN, text, True) == Read(content, reasoning, made)


def reasoning_templates() -> list[str]:
    shown = [name for name in SHOWING if name in PATHS and name != "Kimi-K3"]  # it frames content even without any
    return [name for name in shown if "think" in PATHS[name].read_text(encoding="utf-8").lower()]


@pytest.mark.few(5)
@pytest.mark.parametrize("name", reasoning_templates())
def test_every_reasoning_template_parses_calls_at_end_of_reasoning(name: str) -> None:
    one = subject(name)
    reasoning, form = one.formats.reasoning_format, one.formats.tool_format
    if reasoning is None or not isinstance(form, CallForm) or form.prompt_head or not form.has_distinct_marker:
        pytest.skip("it has no thinking, or its calls have no mark of their own")
    expected = [Call("clock", {"city": "x"}), Call("x", {"city": "y"})][: 2 if form.allows_many else 1]
    text = one.turn(expected)
    text = (text.partition(reasoning.end)[2] if reasoning.end in text else text).strip()
    format = replace(one.message_format(), starts_in_thinking=True)
    for pieces in ([f"So.\n{text}"], list(f"So.\n{text}")):
        message = read(format, pieces)
        assert (message.reasoning, message.content.strip(), message.calls) == ("So.", "", expected), text
    refused = read(replace(format, tools_by_name={}), [f"So.\n{text}"])
    assert (refused.content, refused.calls) == ("", [])


def test_reasoning_stream_holds_back_only_possible_calls() -> None:
    parser = AssistantMessageParser(replace(subject(QWEN).message_format(), starts_in_thinking=True))
    assert parser.parse_delta("I think <tool", []).reasoning == "I think"
    assert parser.parse_delta("_call>\n", []).reasoning == ""
    assert parser.parse_delta("<function=clock>\n<parameter=city>\n", []).reasoning == ""
    assert parser.parse_delta("x\n</parameter>\n</function>\n</tool_call>\nNo.\n", []).reasoning.endswith(
        "</tool_call>\nNo."
    )


INNER = ("ByteDance-Seed-OSS", "MiniMax-M3", "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", QWEN, "StepFun3.5-Flash")
INNER = (*INNER, "deepseek-ai-DeepSeek-V4", "deepseek-ai-DeepSeek-V4-Flash-0731")


@pytest.mark.parametrize("name", INNER)
def test_call_of_known_tool_parses_without_wrapper_tag(name: str) -> None:
    """ollama#16686, ollama#18530."""
    one = subject(name)
    whole = one.turn(ONE)
    head = form_of(name).unwrapped_heads[0]
    bare = whole[whole.index(head[: head.index("\ue000")]) :]
    message = parse_at_every_split(name, "I will look.\n\n" + bare, False)
    assert (message.content.strip(), message.calls) == ("I will look.", ONE), bare
    unknown = "I will look.\n\n" + bare.replace("clock", "stranger")
    message = parse_at_every_split(name, unknown, False)
    assert message.calls == []
    assert "stranger" in message.content
    spoken = "Write " + head.replace("\ue000", "clock").rstrip() + " first."
    assert parse_at_every_split(name, spoken, False).calls == []


@pytest.mark.parametrize(
    "text",
    [
        "A call is written so:\n\n```xml\n" + BARE + "\n```\nThat is all.",
        "A call is written so: " + BARE,
        "Write `" + BARE + "`.",
        "The tag\n<function=clock>\nbegins one.",
        "```\nx\n```\n\n```xml\n" + BARE + "\n```",
    ],
)
def test_calls_quoted_in_text_stay_content(text: str) -> None:
    """ollama#16398."""
    message = parse_at_every_split(QWEN, text, False)
    assert (message.content, message.calls) == (text, [])
    format = replace(subject(QWEN).message_format(), starts_in_thinking=False, reads_code_blocks=True)
    for pieces in ([text], list(text), [text + "\n" + BARE]):
        message = read(format, pieces)
        assert (message.content, message.calls) == (text, ONE if len(pieces[0]) > len(text) else [])


def test_calls_with_duplicate_or_missing_end_tags_are_parsed() -> None:
    """llama.cpp#24807, llama.cpp#12153."""
    twice = CALL.replace("</parameter>\n", "</parameter>\n</parameter>\n<parameter=on>\ntrue\n</parameter>\n")
    assert parse_at_every_split(QWEN, twice, False).calls == [Call("clock", {"city": "x", "on": True})]
    one = '<tool_call>\n{"name": "clock", "arguments": {"city": "x"}}\n'
    assert parse_at_every_split("Qwen-Qwen3-0.6B", one + one + "</tool_call>", False).calls == ONE + ONE


PAIR = [Call("clock", {"city": "x"}), Call("x", {"city": "y"})]
FIRST, SECOND = '{"name": "clock", "parameters": {"city": "x"}}', '{"name": "x", "parameters": {"city": "y"}}'


@pytest.mark.parametrize("between", ["; ", ";", "\n", " ", "", ", ", ";\n", "\n<|python_tag|>", "; <|python_tag|>"])
@pytest.mark.parametrize("name", ["meta-llama-Llama-3.1-8B-Instruct", "meta-llama-Llama-3.2-3B-Instruct"])
def test_llama_3_calls_parse_with_any_separator(name: str, between: str) -> None:
    """unsloth#7426, vllm#25108."""
    if "<" not in between:  # that token is dropped, unless a flag names the format
        assert parse_at_every_split(name, FIRST + between + SECOND, None) == Read("", "", PAIR)
    format = replace(subject(name).message_format(), tool_format=find_tool_format("llama3_json", ""))
    for text in (FIRST + between + SECOND, "<|python_tag|>" + FIRST + between + SECOND):
        for pieces in all_cuts(text):
            assert read(format, pieces) == Read("", "", PAIR), pieces
    rest = parse_at_every_split(name, FIRST + '; {"a": 1} and so on', None)
    assert (rest.content.strip(), rest.calls) == ('; {"a": 1} and so on', PAIR[:1])


def test_random_calls_and_tags_parse_same_in_pieces() -> None:
    rng = random.Random(57)
    parts = [
        CALL,
        BARE,
        STRANGER,
        "<tool_call>",
        "</think>",
        "<think>",
        "\n",
        " hm ",
        "<function=clock>",
        "</tool_call>",
    ]
    format = subject(QWEN).message_format()
    for _ in range(150):
        text = "".join(rng.choices(parts, k=rng.randint(1, 7)))
        for begun in (True, False, None):
            whole = parse_to_text(replace(format, starts_in_thinking=begun), [text])
            cuts = sorted(rng.choices(range(len(text) + 1), k=5))
            pieces = [text[i:j] for i, j in zip([0, *cuts], [*cuts, len(text)], strict=True)]
            assert parse_to_text(replace(format, starts_in_thinking=begun), pieces) == whole, (pieces, begun)
            assert parse_to_text(replace(format, starts_in_thinking=begun), list(text)) == whole, (text, begun)


def parse_to_text(format: object, pieces: list[str]) -> tuple[str, str, str]:
    """Return reasoning, content, and the calls with their arguments as text, because arguments may be truncated."""
    parser, message = AssistantMessageParser(format), ["", "", ""]  # type: ignore[arg-type]
    for position, piece in enumerate(pieces):
        delta = parser.parse_delta(piece, [], final=position == len(pieces) - 1)
        message[0] += delta.reasoning
        message[1] += delta.content
        message[2] += "".join((f"{call.name}: " if call.name else "") + call.arguments for call in delta.tool_calls)
    return message[0], message[1], message[2]


def test_custom_template_call_parses_without_opening_tag() -> None:
    call = '<all><run tool="{{ f.name }}">{{ f.arguments | tojson }}</run></all>'
    one = Subject(template("{{ m.content }}" + each(call)))
    text = '<run tool="clock">{"city": "x"}</run></all>'
    for pieces in ([text], list(text)):
        assert read(one.message_format(), pieces) == Read("", "", ONE)


@pytest.mark.parametrize("filler", ["x", "x>", "}\n", "</"])
def test_call_trial_consumes_long_call_incrementally(filler: str) -> None:
    """Text that a trial leaves unread is searched again with each token, so it must stay short however long the call
    is.
    """
    format = subject(QWEN).message_format()
    assert format.tool_format is not None
    trial = CallTrial(format.tool_format, format.tools_by_name)
    begin, end = CALL.split("x")
    unread = ""
    for start in range(0, len(begin) + 5_000, 7):
        unread += (begin + filler * 5_000)[start : start + 7]
        unread = unread[trial.parse_calls_up_to(unread, len(unread)) :]
        assert not trial.has_failed
        assert len(unread) < 300
    assert trial.finish_trial(unread + end)
