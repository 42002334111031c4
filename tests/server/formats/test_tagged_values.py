"""Values between tags are strings, numbers or objects by the resolved schema, in every template with tagged arguments.

Reported at vllm#36032, vllm#37831, vllm#38973, vllm#48846, sglang#30832, ollama#12621, TensorRT-LLM#12173, mlx-lm#1910,
smg#1841, mlxcel#1336.
"""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache, partial
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from quire.engine.common.request_params import Grammar
from quire.engine.text.grammar_compiler import GrammarCompiler, make_grammar_vocabulary
from quire.server.formats.call_forms.call_form import CallForm
from quire.server.formats.call_forms.tagged_arguments import TaggedArguments
from quire.server.formats.grammar_composition import lark_literal_with_special_tokens
from quire.server.formats.message_parser import AssistantMessageParser
from quire.server.formats.tools.tool_parser import Tool
from tests.server.formats.proof import Call, read, words
from tests.server.formats.test_derived import PATHS, subject
from tests.tiers import examples

STRING, NULL = {"type": "string"}, {"type": "null"}
MAYBE = {"anyOf": [STRING, NULL]}
PARAMETERS: dict[str, Any] = {
    "$defs": {
        "Text": STRING,
        "a/b": {"anyOf": [{"$ref": "#/$defs/Text"}, NULL]},
        "Tree": {"type": "object", "properties": {"next": {"$ref": "#/$defs/Tree"}}},
    },
    "type": "object",
    "properties": {
        "plain": STRING,
        "maybe": MAYBE,
        "listed": {"type": ["string", "null"]},
        "referred": {"$ref": "#/$defs/Text"},
        "escaped": {"$ref": "#/$defs/a~1b"},
        "merged": {"allOf": [{"$ref": "#/$defs/Text"}], "default": "x"},
        "one": {"oneOf": [NULL, {"$ref": "#/$defs/Text"}]},
        "number": {"type": ["integer", "string"]},
        "object": {"anyOf": [{"type": "object"}, STRING]},
        "const": {"const": "5"},
        "mixed": {"enum": ["1", 2, None, "b"]},
        "int": {"anyOf": [{"type": "integer"}, NULL]},
        "tree": {"$ref": "#/$defs/Tree"},
    },
    "additionalProperties": STRING,
}
TEXT = ("plain", "maybe", "listed", "referred", "escaped", "merged", "one")
HARD = (
    "    return x",
    "90210",
    "01234",
    '{"a": 1}',
    "[1, 2]",
    "true",
    "-0.5e3",
    "x\n",
    "\n\tx",
    "nullable",
    "1.",
    " null",
)
CASES: list[tuple[str, str, Any]] = [
    *((name, text, text) for name in TEXT for text in HARD),
    *((name, "null", None) for name in ("maybe", "listed", "escaped", "one")),
    ("plain", "null", "null"),
    ("number", "5", 5),
    ("number", "05", "05"),
    ("number", " 5", " 5"),
    ("number", "5 apples", "5 apples"),
    ("object", '{"a": 1}', {"a": 1}),
    ("object", '{"a": 1', '{"a": 1'),
    ("object", "{x}", "{x}"),
    ("object", "5", "5"),
    ("const", "5", "5"),
    ("mixed", "1", "1"),
    ("mixed", "2", 2),
    ("mixed", "null", None),
    ("mixed", "b", "b"),
    ("int", "7", 7),
    ("int", "null", None),
    ("int", "seven", "seven"),
    ("tree", '{"next": {}}', {"next": {}}),
    ("unknown", "90210", "90210"),
]
UNTYPED = [
    name
    for name in sorted(PATHS)
    if name not in ("deepseek-ai-DeepSeek-V4", "deepseek-ai-DeepSeek-V4-Flash-0731", "Kimi-K3")
]
"""Templates that do not write a value's type next to it."""


@cache
def is_tagged(name: str) -> bool:
    form = subject(name).formats.tool_format
    return isinstance(form, CallForm) and isinstance(form.arguments, TaggedArguments)


def tagged() -> list[str]:
    marks = ("<parameter=", "arg_key", "parameter name", "invoke name", "<param name")
    return [name for name in UNTYPED if any(mark in PATHS[name].read_text(encoding="utf-8") for mark in marks)]


@pytest.mark.few(1)
@pytest.mark.parametrize("name", tagged())
def test_tagged_value_has_type_of_schema(name: str) -> None:
    assert is_tagged(name)
    one = subject(name)
    format = replace(one.message_format(), starts_in_thinking=False, tools_by_name={"clock": Tool("clock", PARAMETERS)})
    for key, written, value in CASES:
        text = render_answer(name, [Call("clock", {key: written})])
        expected = [Call("clock", {key: value})]
        for pieces in ([text], list(text), [text[: len(text) // 2], text[len(text) // 2 :]]):
            assert read(format, pieces).calls == expected, (key, written, text)


def render_answer(name: str, made: list[Call]) -> str:
    one = subject(name)
    text = one.turn(made)
    reasoning = one.formats.reasoning_format
    return text.partition(reasoning.end)[2] if reasoning is not None and reasoning.end in text else text


@pytest.mark.few(3)
@pytest.mark.parametrize("name", tagged())
@settings(deadline=None, suppress_health_check=list(HealthCheck), max_examples=examples(10))
@given(text=words(" ", "null", "01", "{", "["), key=st.sampled_from(TEXT), data=st.data())
def test_tagged_string_values_round_trip_and_fit_grammar(name: str, text: str, key: str, data: st.DataObject) -> None:
    if text in ("null", subject(name).formats.tool_format.arguments.spelling.null):  # type: ignore[union-attr]
        return
    one = subject(name)
    format = replace(one.message_format(), starts_in_thinking=False, tools_by_name={"clock": Tool("clock", PARAMETERS)})
    written = render_answer(name, [Call("clock", {key: text})])
    cut = data.draw(st.integers(0, len(written)))
    for pieces in ([written], [written[:cut], written[cut:]]):
        assert read(format, pieces).calls == [Call("clock", {key: text})], written
    fitting = written.rstrip().removesuffix("</s>").rstrip()
    assert fits(name, fitting), written


@cache
def compiled(name: str) -> tuple[GrammarCompiler, Grammar]:
    one = subject(name)
    tokenizer = one.tokenizer
    compiler = GrammarCompiler(make_grammar_vocabulary(tokenizer, tokenizer.vocab_size, tokenizer.eos_token_ids))
    optional = {**PARAMETERS, "required": []}
    assert one.formats.tool_format is not None
    token = partial(lark_literal_with_special_tokens, tokenizer=tokenizer)
    grammar = Grammar(
        "lark", one.formats.tool_format.build_calls_grammar([Tool("clock", optional)], True, token, must=True)
    )
    compiler.check_grammar(grammar)
    return compiler, grammar


def fits(name: str, text: str) -> bool:
    compiler, grammar = compiled(name)
    matcher = compiler.new_matcher(grammar)
    ids = subject(name).tokenizer.encode(text, add_special_tokens=False)
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


def test_nullable_string_streams_once_null_is_ruled_out() -> None:
    one = subject("Qwen3.5-4B")
    parser = AssistantMessageParser(
        replace(one.message_format(), starts_in_thinking=False, tools_by_name={"clock": Tool("clock", PARAMETERS)})
    )
    head = "<tool_call>\n<function=clock>\n<parameter=maybe>\n"
    assert "".join(call.arguments for call in parser.parse_delta(head + "nu", []).tool_calls) == '{"maybe": '
    assert "".join(call.arguments for call in parser.parse_delta("mber", []).tool_calls) == '"number'


def test_type_written_in_tag_decides_value_type() -> None:
    """DeepSeek V4 and Kimi K3 write the type next to each value."""
    for name in ("deepseek-ai-DeepSeek-V4", "Kimi-K3"):
        one = subject(name)
        format = replace(
            one.message_format(), starts_in_thinking=False, tools_by_name={"clock": Tool("clock", PARAMETERS)}
        )
        expected = [Call("clock", {"maybe": "null", "number": 5, "object": {"a": 1}})]
        text = render_answer(name, expected)
        for pieces in ([text], list(text)):
            assert read(format, pieces).calls == expected, text


def test_integer_beyond_double_precision_is_unchanged() -> None:
    one = subject("Qwen3.5-4B")
    format = replace(one.message_format(), starts_in_thinking=False, tools_by_name={"clock": Tool("clock", PARAMETERS)})
    text = render_answer("Qwen3.5-4B", [Call("clock", {"number": 12345678901234567890123})])
    assert json.dumps(read(format, [text]).calls[0].arguments) == '{"number": 12345678901234567890123}'
