"""Strings with a pattern, as grammars of custom tools make of their input, in calls that are not JSON: through the real
matcher, on every form that a template shows or that has a name, and read back by its parser."""

from __future__ import annotations

import json
import re

import pytest

from quire.engine.text.grammar import GrammarCompiler, vocabulary_of
from quire.engine.text.tokenizer import Tokenizer
from quire.server.formats.forms.arguments import LiteralArguments
from quire.server.formats.forms.patterns import whole
from quire.server.formats.tools.format import ToolFormat, ToolParser
from quire.server.formats.tools.table import TABLE, NamedFormat
from quire.server.protocol.chat import ChatRequest
from quire.server.resolve.custom_tools import holds_patterns
from quire.server.resolve.tools import ToolUse, tool_use
from tests.server.formats.proof import Call
from tests.server.formats.test_derived import SHOWING, compiler, form_of, subject
from tests.server.formats.test_regular import FITS, FITS_NOT, PATCHES
from tests.server.formats.test_tools_grammar import TOKENIZERS, walk

NOT_HELD = {"escaped_attributes", "json_in_string"}
"""Templates that write strings with escapes of their own: for these, a custom tool's grammar is refused."""
HARD = "[ab</>\\n\"' \\]]{0,12}"
"""Texts that look like the marks around them."""


def use_of(format: ToolFormat, syntax: str, definition: str) -> ToolUse:
    """A custom tool with this grammar, which must be called."""
    grammar = {"type": "grammar", "grammar": {"syntax": syntax, "definition": definition}}
    tool = {"type": "custom", "custom": {"name": "clock", "format": grammar}}
    asked = {"messages": [{"role": "user"}], "tools": [tool]}
    return tool_use(ChatRequest.model_validate({**asked, "tool_choice": "required"}), format)


def inputs_of(use: ToolUse, text: str) -> list[str]:
    assert use.format is not None
    parser = ToolParser(use.format, use.known)
    _, deltas = parser.push(text, final=True)
    assert parser.all_complete, text
    indices = sorted({delta.index for delta in deltas})
    return [json.loads("".join(each.arguments for each in deltas if each.index == at))["input"] for at in indices]


def written(name: str, text: str) -> str:
    """A call as the template writes it, without what is before calls. A string with a pattern stands as JSON's where
    the template would write Python's, and letters as they are where it would escape them."""
    one, form = subject(name), form_of(name)
    turn = one.turn([Call("clock", {"input": text})])
    if one.formats.reasoning is not None and one.formats.reasoning.end in turn:
        turn = turn.partition(one.formats.reasoning.end)[2].lstrip()
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
    grammar = use.grammar(one.tokenizer)
    assert grammar is not None
    compiler(name).check(grammar)
    for text in (*FITS, *FITS_NOT):
        turn = written(name, text)
        matcher = compiler(name).matcher(grammar)
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
@pytest.mark.parametrize("row", TABLE, ids=lambda row: row.name)
def test_formats_with_names_let_nothing_else_through(row: NamedFormat, kind: str) -> None:
    one = TOKENIZERS[kind]
    made = GrammarCompiler(vocabulary_of(one, one.vocab_size, one.eos_token_ids))
    check_walks(made, one, use_of(row.format, "regex", HARD))


def check_walks(compiler: GrammarCompiler, tokenizer: Tokenizer, use: ToolUse) -> None:
    grammar = use.grammar(tokenizer)
    assert grammar is not None
    for seed in range(12):
        text = walk(compiler, tokenizer, grammar, seed)
        found = inputs_of(use, text)
        assert found, text
        assert all(re.fullmatch(HARD, each) for each in found), text


@pytest.mark.parametrize("name", sorted(NOT_HELD))
def test_where_strings_have_escapes_of_their_own_no_pattern_is_held(name: str) -> None:
    assert not holds_patterns(form_of(name))


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
        assert (re.fullmatch(whole(pattern), text) is not None) is (text in fits), text
