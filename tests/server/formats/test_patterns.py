"""Strings with a pattern, which grammars of custom tools become, in calls that are not JSON: through the real matcher,
for every inferred and every named call form, and parsed back.
"""

from __future__ import annotations

import json
import re

import pytest

from quire.engine.text.grammar_compiler import GrammarCompiler, make_grammar_vocabulary
from quire.engine.text.tokenizer import Tokenizer
from quire.server.formats.call_forms.argument_forms import LiteralArguments
from quire.server.formats.call_forms.schema_patterns import full_match_pattern
from quire.server.formats.tools.named_formats import TOOL_FORMATS, NamedToolFormat
from quire.server.formats.tools.tool_parser import ToolFormat, ToolParser
from quire.server.protocol.chat import ChatRequest
from quire.server.resolve.custom_tools import can_enforce_patterns
from quire.server.resolve.tool_use import RequestTools, resolve_request_tools
from tests.server.formats.proof import Call
from tests.server.formats.test_derived import SHOWING, compiler, form_of, subject
from tests.server.formats.test_lark_to_regex import FITS, FITS_NOT, PATCHES
from tests.server.formats.test_tools_grammar import TOKENIZERS, walk

NOT_HELD = {"escaped_attributes", "json_in_string"}
"""Templates that write strings with escapes of their own, so that a custom tool's grammar is rejected."""
HARD = "[ab</>\\n\"' \\]]{0,12}"
"""Texts that look like the marks around them."""


def request_tools(format: ToolFormat, syntax: str, definition: str) -> RequestTools:
    """Return the tools of a request that must call a custom tool with this grammar."""
    grammar = {"type": "grammar", "grammar": {"syntax": syntax, "definition": definition}}
    tool = {"type": "custom", "custom": {"name": "clock", "format": grammar}}
    body = {"messages": [{"role": "user"}], "tools": [tool]}
    return resolve_request_tools(ChatRequest.model_validate({**body, "tool_choice": "required"}), format)


def parsed_inputs(use: RequestTools, text: str) -> list[str]:
    assert use.tool_format is not None
    parser = ToolParser(use.tool_format, use.tools_by_name)
    _, deltas = parser.extract_tool_calls(text, final=True)
    assert parser.all_complete, text
    indices = sorted({delta.index for delta in deltas})
    return [json.loads("".join(each.arguments for each in deltas if each.index == at))["input"] for at in indices]


def rendered_call(name: str, text: str) -> str:
    """Return a call as the template renders it, without the text before calls. A string with a pattern is written as
    JSON where the template would write a Python literal, and its letters stay unescaped.
    """
    one, form = subject(name), form_of(name)
    turn = one.turn([Call("clock", {"input": text})])
    if one.formats.reasoning_format is not None and one.formats.reasoning_format.end in turn:
        turn = turn.partition(one.formats.reasoning_format.end)[2].lstrip()
    turn = turn.rstrip().removesuffix("</s>").rstrip().replace("\\u00e9", "é")
    if isinstance(form.arguments, LiteralArguments) and len(form.arguments.syntax.quote) == 1:
        for python in (repr(text), f"'{text}'"):
            turn = turn.replace(python, json.dumps(text, ensure_ascii=False))
    return turn


@pytest.mark.few(6)
@pytest.mark.parametrize("name", [name for name in SHOWING if name not in NOT_HELD])
def test_grammar_accepts_rendered_inputs_only_if_pattern_matches(name: str) -> None:
    one, form = subject(name), form_of(name)
    use = request_tools(form, "lark", PATCHES)
    grammar = use.build_tool_grammar(one.tokenizer)
    assert grammar is not None
    compiler(name).check_grammar(grammar)
    for text in (*FITS, *FITS_NOT):
        turn = rendered_call(name, text)
        matcher = compiler(name).new_matcher(grammar)
        ids = one.tokenizer.encode(turn, add_special_tokens=False)
        allowed = matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()
        assert allowed is (text in FITS), turn
        assert not allowed or parsed_inputs(use, turn) == [text], turn


@pytest.mark.few(6)
@pytest.mark.parametrize("name", [name for name in SHOWING if name not in NOT_HELD])
def test_grammar_samples_parse_as_inputs_that_match_pattern(name: str) -> None:
    one = subject(name)
    assert_samples_match(compiler(name), one.tokenizer, request_tools(form_of(name), "regex", HARD))


@pytest.mark.few(6)
@pytest.mark.parametrize("kind", TOKENIZERS)
@pytest.mark.parametrize("row", TOOL_FORMATS, ids=lambda row: row.name)
def test_named_formats_sample_only_inputs_that_match_pattern(row: NamedToolFormat, kind: str) -> None:
    one = TOKENIZERS[kind]
    grammar_compiler = GrammarCompiler(make_grammar_vocabulary(one, one.vocab_size, one.eos_token_ids))
    assert_samples_match(grammar_compiler, one, request_tools(row.format, "regex", HARD))


def assert_samples_match(compiler: GrammarCompiler, tokenizer: Tokenizer, use: RequestTools) -> None:
    grammar = use.build_tool_grammar(tokenizer)
    assert grammar is not None
    for seed in range(12):
        text = walk(compiler, tokenizer, grammar, seed)
        inputs = parsed_inputs(use, text)
        assert inputs, text
        assert all(re.fullmatch(HARD, each) for each in inputs), text


@pytest.mark.parametrize("name", sorted(NOT_HELD))
def test_patterns_are_unenforceable_when_strings_have_custom_escapes(name: str) -> None:
    assert not can_enforce_patterns(form_of(name))


@pytest.mark.parametrize(
    ("pattern", "fits", "fits_not"),
    [
        ("b", ["b", "abc", "a\nb"], ["a", ""]),
        ("^a|b$", ["ax", "xb"], ["xa", "bx"]),
        ("^(a|b)$", ["a", "b"], ["ab", "xa", ""]),
        ("^[|(^$]$", ["|", "(", "$"], ["a", "||"]),
        (r"^a\$", ["a$", "a$b"], ["a"]),
        ("^$", [""], ["a"]),
        ("", ["", "a\n"], []),
    ],
)
def test_full_match_pattern_equals_unanchored_search(pattern: str, fits: list[str], fits_not: list[str]) -> None:
    for text in (*fits, *fits_not):
        assert (re.search(pattern, text) is not None) is (text in fits), "what the pattern means"
        assert (re.fullmatch(full_match_pattern(pattern), text) is not None) is (text in fits), text
