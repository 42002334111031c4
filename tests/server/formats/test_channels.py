"""Templates whose answers consist of delimited parts: several spans of reasoning, framed content, tool calls."""

from __future__ import annotations

import json
from typing import Any

import pytest

from quire.engine.text.grammar_compiler import GrammarCompiler, json_grammar, make_grammar_vocabulary
from quire.server.formats.grammar_composition import add_content_delimiters, add_thinking_grammar
from quire.server.formats.message_parser import AssistantMessageParser
from tests.server.api import open_api
from tests.server.fake import FakeEngine, scripted
from tests.server.formats.proof import Call, Subject, read
from tests.server.formats.templates import HARMONY, OWN, template
from tests.server.formats.test_tools import all_cuts

EOS = 258
PATH = "/v1/chat/completions"
RECIPIENTS = (
    "{% for m in messages %}{% if m.role == 'assistant' %}"
    "{% if m.reasoning_content %}<|go|>model to=self<|is|>{{ m.reasoning_content }}<|part|>{% endif %}"
    "{% if m.tool_calls %}{% for c in m.tool_calls %}<|go|>model to={{ c.function.name }}<|is|>"
    "{{ c.function.arguments | tojson }}{{ '<|stop|>' if loop.last else '<|part|>' }}{% endfor %}"
    "{% else %}<|go|>model to=user<|is|>{{ m.content }}<|stop|>{% endif %}"
    "{% else %}<|go|>{{ m.role }}<|is|>{{ m.content }}<|stop|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|go|>model{% endif %}"
)
"""Each part names its recipient: the model itself, the user, or a tool."""
FRAMED = template(
    "<|think|>{{ m.reasoning_content or '' }}<|/think|>"
    "<|say|>{{ m.content }}<|/say|>"
    "{% if m.tool_calls %}<|do|>{% for c in m.tool_calls %}{{ c.function.name }}({{ c.function.arguments | tojson }})"
    "{% endfor %}<|/do|>{% endif %}",
    lead="<|model|>",
    end="<|eot|>",
)
MODELS = {"harmony": HARMONY, "recipients": RECIPIENTS, "framed": FRAMED, "thinking": OWN["thinking"]}
H, A = "<|channel|>{}<|message|>", "<|start|>assistant"
CASES: list[tuple[str, str, str, str, list[Call]]] = [
    ("harmony", H.format("final") + "Hi.<|return|>", "", "Hi.", []),
    ("harmony", H.format("analysis") + "hm<|end|>" + A + H.format("final") + "Hi.", "hm", "Hi.", []),
    (
        "harmony",
        H.format("analysis") + "a<|end|>" + A + H.format("commentary") + "Wait. <|end|>" + A + H.format("analysis")
        + "b<|end|>" + A + H.format("final") + "Hi.<|return|>",
        "ab",
        "Wait. Hi.",
        [],
    ),
    (
        "harmony",
        H.format("analysis") + "hm<|end|>" + A + "<|channel|>commentary to=functions.clock <|constrain|>json<|message|>"
        '{"x": "<|end|>"}<|call|>',
        "hm",
        "",
        [Call("clock", {"x": "<|end|>"})],
    ),
    ("harmony", " to=functions.clock<|channel|>commentary json<|message|>{}<|call|>", "", "", [Call("clock", {})]),
    ("recipients", " to=user<|is|>Hi.<|stop|>", "", "Hi.", []),
    ("recipients", " to=self<|is|>hm<|part|><|go|>model to=user<|is|>Hi.", "hm", "Hi.", []),
    (
        "recipients",
        ' to=self<|is|>a<|part|><|go|>model to=clock<|is|>{"city": "x"}<|part|><|go|>model to=clock<|is|>{}<|stop|>',
        "a",
        "",
        [Call("clock", {"city": "x"}), Call("clock", {})],
    ),
    ("recipients", " to=stranger<|is|>{}", "", "to=stranger<|is|>{}", []),
    ("framed", "<|think|>hm<|/think|><|say|>Hi.<|/say|><|eot|>", "hm", "Hi.", []),
    ("framed", '<|think|>hm<|/think|><|say|>So: <|/say|><|do|>clock({"city": "a<|/say|>b"})<|/do|><|eot|>', "hm", "So:",
     [Call("clock", {"city": "a<|/say|>b"})]),
    ("thinking", "<reason>a</reason>x <reason>b</reason>y", "ab", "x y", []),
    ("thinking", '<reason>a</reason><ops>clock{"x": "<reason>"}</ops>', "a", "", [Call("clock", {"x": "<reason>"})]),
    ("thinking", "<reason>a</reason>Write `<reason>` first.", "a", "Write `<reason>` first.", []),
    ("thinking", "No <reason>b</reason>", "", "No <reason>b</reason>", []),
]  # fmt: skip


@pytest.mark.parametrize(("name", "text", "reasoning", "content", "made"), CASES)
def test_reasoning_content_and_calls_parse_same_at_any_split(
    name: str, text: str, reasoning: str, content: str, made: list[Call]
) -> None:
    format = Subject(MODELS[name]).message_format()
    whole = read(format, [text])
    assert (whole.reasoning, whole.content.strip(), whole.calls) == (reasoning, content, made)
    for pieces in all_cuts(text):
        assert read(format, pieces) == whole, pieces


@pytest.mark.parametrize("name", ["bare_python", "json_in_string", "lines", "fenced", "python_dict"])
def test_plain_text_streams_without_delay(name: str) -> None:
    parser = AssistantMessageParser(Subject(OWN[name]).message_format())
    assert parser.parse_delta("Hello, ", range(7)).content.rstrip() == "Hello,"
    assert parser.parse_delta("world (", range(7, 14)).content.strip() == "world ("


def test_turn_end_token_is_dropped_when_calls_begin_with_same_token() -> None:
    calls = "{% for c in m.tool_calls or [] %}<|sep|>call<|is|>{{ c.function | tojson }}{% endfor %}"
    one = Subject(template("{{ m.content }}" + calls, lead="<|model|>", end="<|sep|>\n"))
    for text, expected in (
        ("Hi.<|sep|>\n", ("Hi.", [])),
        ('<|sep|>call<|is|>{"name": "clock", "arguments": {}}<|sep|>\n', ("", [Call("clock", {})])),
        ("Hi.<|sep|>there", ("Hi.<|sep|>there", [])),
    ):
        for pieces in ([text], list(text)):
            message = read(one.message_format(), pieces)
            assert (message.content.strip(), message.calls) == expected


@pytest.mark.parametrize(
    ("name", "right", "wrong"),
    [
        ("harmony", H.format("final") + '{"a": 1}', '{"a": 1}'),
        ("harmony", H.format("analysis") + "hm<|end|>" + A + H.format("final") + '{"a": 1}', H.format("final") + "a"),
        ("recipients", ' to=self<|is|>hm<|part|><|go|>model to=user<|is|>{"a": 1}', ' to=user<|is|>{"a": "b"}'),
        ("framed", '<|think|>hm<|/think|><|say|>{"a": 1}<|/say|>', '<|think|>hm<|/think|>{"a": 1}'),
    ],
)
def test_json_grammar_applies_inside_content_delimiters(name: str, right: str, wrong: str) -> None:
    one = Subject(MODELS[name])
    format, tokenizer = one.message_format(), one.tokenizer
    schema = {"properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
    grammar = add_content_delimiters(json_grammar(schema), one.formats.content_delimiters, tokenizer)
    assert format.reasoning_format is not None
    grammar = add_thinking_grammar(grammar, format.reasoning_format, format.starts_in_thinking, tokenizer)
    compiler = GrammarCompiler(make_grammar_vocabulary(tokenizer, tokenizer.vocab_size, tokenizer.eos_token_ids))
    compiler.check_grammar(grammar)
    for text, fits in ((right, True), (wrong, False)):
        matcher = compiler.new_matcher(grammar)
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert (matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()) is fits, text
    assert json.loads(read(format, [right]).content) == {"a": 1}


async def test_chat_completion_splits_recipient_parts_whole_and_streamed() -> None:
    text = " to=self<|is|>hm é<|part|><|go|>model to=user<|is|>Hi."
    engine = FakeEngine(scripted(text.encode(), EOS), eos=[EOS])
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "Hello"}]}
    async with open_api(engine, chat_template=RECIPIENTS) as api:
        whole = await api.post(PATH, body)
        events = await api.events(PATH, body)
    message = whole["choices"][0]["message"]
    assert (message["content"], message["reasoning_content"]) == ("Hi.", "hm é")
    for name in ("content", "reasoning_content"):
        assert "".join(event["choices"][0]["delta"].get(name) or "" for event in events) == message[name]
    counted = whole["usage"]["completion_tokens_details"]["reasoning_tokens"]
    assert counted == len(" to=self<|is|>hm é<|part|>".encode())
