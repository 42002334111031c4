"""Grammars of required tool calls: texts that they allow parse as complete calls that fit the schemas."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from quire.engine.common.request_params import Grammar
from quire.engine.text.grammar_compiler import GrammarCompiler, json_grammar, make_grammar_vocabulary
from quire.engine.text.tokenizer import Tokenizer
from quire.server.formats.call_forms.slots import TAG
from quire.server.formats.grammar_composition import add_thinking_grammar, either_grammar
from quire.server.formats.reasoning_parser import ReasoningFormat
from quire.server.formats.tools.named_formats import TOOL_FORMATS, NamedToolFormat
from quire.server.formats.tools.tool_parser import ToolParser
from quire.server.protocol.chat import ChatRequest
from quire.server.resolve.tool_use import resolve_request_tools
from tests.texts import BYTES

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "enum": ["Rome", 'A "b"\n']},
                    "days": {"type": "integer", "minimum": 1, "maximum": 9},
                    "unit": {"$ref": "#/$defs/unit"},
                    "deep": {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 2},
                },
                "required": ["city", "deep"],
                "additionalProperties": False,
                "$defs": {"unit": {"enum": [1, None]}},
            },
        },
    },
    {"type": "function", "function": {"name": "clock", "parameters": {"additionalProperties": False}}},
    {
        "type": "function",
        "function": {
            "name": "note",
            "parameters": {"properties": {"text": {"type": "string", "maxLength": 3}}, "additionalProperties": False},
        },
    },
]  # fmt: skip
MARKERS = {mark for row in TOOL_FORMATS for text in row.format.literals for mark in TAG.findall(text)}
MARKERS -= {"</function>", "</parameter>"}
EOS = "<|end|>"


def make_tokenizer(special: bool, chat_template: str = "") -> Tokenizer:
    """Bytes, an end token, and the markers of all formats as special tokens if `special`."""
    backend = tokenizers.Tokenizer(models.BPE({character: i for i, character in enumerate(BYTES)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([EOS, *(sorted(MARKERS) if special else [])])
    return Tokenizer(backend, special_tokens={"eos_token": EOS}, chat_templates={"default": chat_template})


TOKENIZERS = {"text": make_tokenizer(False), "special": make_tokenizer(True)}


@pytest.fixture(scope="module")
def compilers() -> Mapping[str, GrammarCompiler]:
    return {
        name: GrammarCompiler(make_grammar_vocabulary(one, one.vocab_size, one.eos_token_ids))
        for name, one in TOKENIZERS.items()
    }


def walk(compiler: GrammarCompiler, tokenizer: Tokenizer, grammar: Any, seed: int) -> str:
    """Return a text that the grammar allows, sampled token by token; after 300 tokens it ends as soon as it may."""
    rng = random.Random(seed)
    matcher = compiler.new_matcher(grammar)
    end = tokenizer.eos_token_ids[0]
    ids: list[int] = []
    while not matcher.is_stopped():
        allowed = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little").nonzero()[0]
        assert len(allowed), matcher.get_error()
        stop = end in allowed and (len(ids) > 300 or rng.random() < 0.3)
        picked = end if stop else rng.choice([one for one in allowed.tolist() if one != end] or [end])
        if picked == end:
            break
        assert matcher.consume_token(picked), matcher.get_error()
        ids.append(picked)
        assert len(ids) < 3000, tokenizer.decode(ids)
    return tokenizer.decode(ids, skip_special_tokens=False)


def check_arguments(name: str, arguments: str, xml: bool) -> None:
    values = json.loads(arguments)
    if name == "weather":
        assert {"city", "deep"} <= values.keys() <= {"city", "days", "unit", "deep"}
        assert values["city"] in ("Rome", 'A "b"\n')
        assert values.get("days", 1) in range(1, 10)
        assert values.get("unit", 1) in (1, None)
        assert all(isinstance(one, bool) for one in values["deep"])
    elif name == "note":
        assert values.keys() <= {"text"}
        assert xml or len(values.get("text", "")) <= 3
    else:
        assert (name, values) == ("clock", {})


@pytest.mark.few(10)
@pytest.mark.parametrize("kind", TOKENIZERS)
@pytest.mark.parametrize("row", TOOL_FORMATS, ids=lambda row: row.name)
@pytest.mark.parametrize("choice", ["required", "weather", "one"])
def test_required_call_grammar_samples_parse_as_complete_calls(
    row: NamedToolFormat, kind: str, choice: str, compilers: Mapping[str, GrammarCompiler]
) -> None:
    xml = row.name in ("qwen3_coder", "seed_oss")
    tools = TOOLS[:2] if xml else TOOLS
    named = {"type": "function", "function": {"name": choice}} if choice == "weather" else "required"
    body = {"messages": [{"role": "user"}], "tools": tools, "tool_choice": named}
    use = resolve_request_tools(
        ChatRequest.model_validate({**body, "parallel_tool_calls": choice != "one"}), row.format
    )
    grammar = use.build_tool_grammar(TOKENIZERS[kind])
    assert grammar is not None
    compilers[kind].check_grammar(grammar)
    counts = set()
    for seed in range(12):
        text = walk(compilers[kind], TOKENIZERS[kind], grammar, seed)
        parser = ToolParser(row.format, use.tools_by_name)
        content, deltas = parser.extract_tool_calls(text, final=True)
        assert (content, parser.all_complete) == ("", True), text
        names = [delta.name for delta in deltas if delta.name]
        for index, name in enumerate(names):
            assert name is not None
            check_arguments(name, "".join(delta.arguments for delta in deltas if delta.index == index), xml)
        assert choice != "weather" or names == ["weather"]
        counts.add(len(names))
    assert (counts == {1}) is (choice != "required" or row.name == "openai"), counts


@pytest.mark.parametrize("kind", TOKENIZERS)
@pytest.mark.parametrize("row", TOOL_FORMATS, ids=lambda row: row.name)
def test_strict_tools_leave_text_free_and_constrain_calls(
    row: NamedToolFormat, kind: str, compilers: Mapping[str, GrammarCompiler]
) -> None:
    def grammar(choice: str) -> Grammar:
        tools: list[Any] = [{**tool, "function": {**tool["function"], "strict": True}} for tool in TOOLS[:2]]
        body = {"messages": [{"role": "user"}], "tools": tools, "tool_choice": choice}
        tool_grammar = resolve_request_tools(ChatRequest.model_validate(body), row.format).build_tool_grammar(
            TOKENIZERS[kind]
        )
        assert tool_grammar is not None
        return tool_grammar

    def fits(text: str) -> bool:
        matcher = compilers[kind].new_matcher(auto)
        ids = TOKENIZERS[kind].encode(text)
        return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()

    auto, required = grammar("auto"), grammar("required")
    compilers[kind].check_grammar(auto)
    if row.name == "openai":
        assert fits("<|channel|>final<|message|>Hé!"), "content has marks there"
        return
    lead = "" if row.name in ("pythonic", "llama3_json") else "Well: \n"
    for text in ("", "Hé!\n", 'I think {"a": [1]} < b> [x] <tool', '{"a": "b"}', "<|x"):
        assert fits(text), text
    for seed in range(5):
        calls = walk(compilers[kind], TOKENIZERS[kind], required, seed)
        assert fits(lead + calls)
        assert not fits(lead + calls[:-3])
        assert not fits(lead + calls.replace("weather", "whether").replace("clock", "block"))


@pytest.mark.few(6)
@pytest.mark.parametrize("kind", TOKENIZERS)
@pytest.mark.parametrize("row", TOOL_FORMATS, ids=lambda row: row.name)
def test_grammar_allows_either_calls_or_formatted_content(
    row: NamedToolFormat, kind: str, compilers: Mapping[str, GrammarCompiler]
) -> None:
    """The answer is either calls or content that fits the format, never both. The same holds after reasoning."""
    body = {"messages": [{"role": "user"}], "tools": TOOLS[:2]}
    use = resolve_request_tools(ChatRequest.model_validate(body), row.format)
    tokenizer, compiler = TOKENIZERS[kind], compilers[kind]
    calls = use.build_tool_grammar(tokenizer, calls_only=True)
    assert calls is not None
    assert use.build_tool_grammar(tokenizer) is None, "without a format the answer is free"
    shape = {"a": {"type": "integer"}, "name": {"type": "string"}}  # calls have a name too
    content = json_grammar({"properties": shape, "minProperties": 1, "additionalProperties": False})
    both = either_grammar(content, calls)
    thinking = add_thinking_grammar(both, ReasoningFormat("think", "<think>", "</think>"), True, tokenizer)

    def fits(grammar: Grammar, text: str) -> bool:
        matcher = compiler.new_matcher(grammar)
        ids = tokenizer.encode(text)
        return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()

    compiler.check_grammar(both)
    for grammar, lead in ((both, ""), (thinking, "hm</think>\n\n")):
        for text in ('{"a": 1}', '{"name": "Bob"}', '{"name":"weather"}'):
            assert fits(grammar, lead + text), text
        for seed in range(3):
            text = walk(compiler, tokenizer, calls, seed)
            assert fits(grammar, lead + text)
            assert not fits(grammar, lead + text + '{"a": 1}')
        for wrong in ("Well: ", '{"b": 1}', "", '{"a": 1} {"a": 1}'):
            assert not fits(grammar, lead + wrong), wrong


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_xml_text_value_ends_at_parameter_end_tag(kind: str, compilers: Mapping[str, GrammarCompiler]) -> None:
    row = next(row for row in TOOL_FORMATS if row.name == "qwen3_coder")
    body = {"messages": [{"role": "user"}], "tools": TOOLS, "tool_choice": "required"}
    grammar = resolve_request_tools(ChatRequest.model_validate(body), row.format).build_tool_grammar(TOKENIZERS[kind])
    assert grammar is not None
    head = "<tool_call>\n<function=note>\n<parameter=text>\na <b>\n</parameter>\n"
    for text, allowed in ((f"{head}</function>\n</tool_call>", True), (f"{head}a", False), ("<tool_call>\n{", False)):
        matcher = compilers[kind].new_matcher(grammar)
        ids = TOKENIZERS[kind].encode(text)
        assert (matcher.try_consume_tokens(ids) == len(ids)) is allowed, matcher.get_error()
        assert not allowed or matcher.is_accepting()
