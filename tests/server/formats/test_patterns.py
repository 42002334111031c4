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


def use_of(format: ToolFormat, syntax: str, definition: str) -> RequestTools:
    """Return the tools of a request that must call a custom tool with this grammar."""
    grammar = {"type": "grammar", "grammar": {"syntax": syntax, "definition": definition}}
    tool = {"type": "custom", "custom": {"name": "clock", "format": grammar}}
    asked = {"messages": [{"role": "user"}], "tools": [tool]}
    return resolve_request_tools(ChatRequest.model_validate({**asked, "tool_choice": "required"}), format)


def inputs_of(use: RequestTools, text: str) -> list[str]:
    assert use.tool_format is not None
    parser = ToolParser(use.tool_format, use.tools_by_name)
    _, deltas = parser.extract_tool_calls(text, final=True)
    assert parser.all_complete, text
    indices = sorted({delta.index for delta in deltas})
    return [json.loads("".join(each.arguments for each in deltas if each.index == at))["input"] for at in indices]


def written(name: str, text: str) -> str:
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
def test_what_a_template_renders_is_allowed_where_it_matches(name: str) -> None:
    one, form = subject(name), form_of(name)
    use = use_of(form, "lark", PATCHES)
    grammar = use.build_tool_grammar(one.tokenizer)
    assert grammar is not None
    compiler(name).check_grammar(grammar)
    for text in (*FITS, *FITS_NOT):
        turn = written(name, text)
        matcher = compiler(name).new_matcher(grammar)
        ids = one.tokenizer.encode(turn, add_special_tokens=False)
        allowed = matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()
        assert allowed is (text in FITS), turn
        assert not allowed or inputs_of(use, turn) == [text], turn


@pytest.mark.few(6)
@pytest.mark.parametrize("name", [name for name in SHOWING if name not in NOT_HELD])
def test_what_a_grammar_lets_through_is_read_as_what_matches(name: str) -> None:
    one = subject(name)
    check_walks(compiler(name), one.tokenizer, use_of(form_of(name), "regex", HARD))


@pytest.mark.few(6)
@pytest.mark.parametrize("kind", TOKENIZERS)
@pytest.mark.parametrize("row", TOOL_FORMATS, ids=lambda row: row.name)
def test_formats_with_names_let_nothing_else_through(row: NamedToolFormat, kind: str) -> None:
    one = TOKENIZERS[kind]
    made = GrammarCompiler(make_grammar_vocabulary(one, one.vocab_size, one.eos_token_ids))
    check_walks(made, one, use_of(row.format, "regex", HARD))


def check_walks(compiler: GrammarCompiler, tokenizer: Tokenizer, use: RequestTools) -> None:
    grammar = use.build_tool_grammar(tokenizer)
    assert grammar is not None
    for seed in range(12):
        text = walk(compiler, tokenizer, grammar, seed)
        found = inputs_of(use, text)
        assert found, text
        assert all(re.fullmatch(HARD, each) for each in found), text


@pytest.mark.parametrize("name", sorted(NOT_HELD))
def test_where_strings_have_escapes_of_their_own_no_pattern_is_held(name: str) -> None:
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
def test_a_pattern_finds_its_place_in_a_text(pattern: str, fits: list[str], fits_not: list[str]) -> None:
    for text in (*fits, *fits_not):
        assert (re.search(pattern, text) is not None) is (text in fits), "what the pattern means"
        assert (re.fullmatch(full_match_pattern(pattern), text) is not None) is (text in fits), text
