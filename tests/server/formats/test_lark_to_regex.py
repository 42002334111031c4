"""Lark grammars as regular expressions, and custom tools whose input must follow them, through the real matcher."""

from __future__ import annotations

import json
import re

import pytest

from quire.engine.common.errors import InvalidRequest
from quire.engine.text.grammar_compiler import GrammarCompiler, make_grammar_vocabulary
from quire.server.formats.lark_to_regex import lark_to_regex
from tests.server.api import VOCAB_SIZE, open_api
from tests.server.fake import FakeEngine, scripted
from tests.server.formats.templates import OWN
from tests.texts import byte_level_tokenizer

PATCHES = """
// What a patch of files is.
start: begin part+ end
begin: "*** Begin" LF
end: "*** End" LF?
?part: adding
    | removing -> taken  // two kinds
adding: "+++ " path LF (("+" | "-") /(.*)/ LF)+
removing.2: "--- " path LF
path: /[^\\n\\/]+(\\/[^\\n\\/]+)*/

%import common.LF
"""
FITS = ['*** Begin\n+++ a/b.py\n+x = "é"\n-\n*** End\n', "*** Begin\n--- é\n*** End"]
FITS_NOT = ["", "*** Begin\n*** End\n", "*** Begin\n+++ a\n*** End\n", "*** Begin\n--- /\n*** End\n", "x" + FITS[1]]
CASES = [
    ('start: "a"~2..3 "b"i ["c"]', ["aab", "aaaB", "aabc"], ["ab", "aaab c", "aaaab"]),
    ('start: ("0".."9")+ "."', ["12."], [".", "a."]),
    ("start: INT | WORD\n%import common (INT, WORD)", ["12", "ab"], ["1a", ""]),
    ("start: X\nX: /a.c/s\n", ["abc", "a\nc"], ["ac"]),
    ('start: N ("," N)*\n%import common.NUMBER -> N', ["1,2.5,3e4"], ["1,", "e"]),
    ('start: "\\\\" "\\n" "\\u20ac" "[" ".*"', ["\\\n€[.*"], ["\\n€[.*", "\\\n€[ab"]),
    ('start: a\na: "x"\n    | "y"\n    // no third\n', ["x", "y"], ["z"]),
]


@pytest.mark.parametrize(("grammar", "fits", "fits_not"), [(PATCHES, FITS, FITS_NOT), *CASES])
def test_lark_to_regex_matches_same_texts_as_grammar(grammar: str, fits: list[str], fits_not: list[str]) -> None:
    expression = lark_to_regex(grammar)
    assert [text for text in fits if not re.fullmatch(expression, text)] == []
    assert [text for text in fits_not if re.fullmatch(expression, text)] == []


@pytest.mark.parametrize(
    ("grammar", "why"),
    [
        ('start: "(" start? ")"', "start is recursive"),
        ('start: a\na: b\nb: a "x"', "rule a is recursive"),
        ("start: a", "no rule named a"),
        ('a: "x"', "no rule named start"),
        ('start: "x"\nstart: "y"', "two rules named start"),
        ('start: ("x"', "has an unclosed bracket"),
        ('start: "x")', "has an unmatched closing bracket"),
        ('start: ("x"]', "has an unmatched closing bracket"),
        ('start: "x" & "y"', "is not supported"),
        ('start: "x"\n%ignore " "', "cannot be parsed"),
        ('start: "x"\n%import python.NAME', "cannot be parsed"),
        ("start: X\n%import common.SH_COMMENT", "common.SH_COMMENT"),
        ('start: "\\x"', "broken escape"),
        ("start: " + "a0\n" + "\n".join(f"a{i}: a{i + 1} a{i + 1}" for i in range(40)) + '\na40: "x"', "too long"),
        ("start: " + "a0\n" + "\n".join(f"a{i}: a{i + 1}" for i in range(400)) + '\na400: "x"', "too deeply"),
    ],
)
def test_lark_to_regex_rejects_unsupported_grammars(grammar: str, why: str) -> None:
    with pytest.raises(InvalidRequest, match=re.escape(why)):
        lark_to_regex(grammar)


def call(text: str) -> str:
    return (
        f"<tool_call>\n{json.dumps({'name': 'patch', 'arguments': {'input': text}}, ensure_ascii=False)}\n</tool_call>"
    )


async def test_custom_tool_input_is_constrained_by_format_grammar() -> None:
    named = byte_level_tokenizer()
    compiler = GrammarCompiler(make_grammar_vocabulary(named.tokenizer, VOCAB_SIZE, [258]))
    engine = FakeEngine(scripted(call(FITS[0]).encode(), 258), eos=[258], max_model_len=4096)

    def fits(text: str) -> bool:
        grammar = engine.seen[-1].params.grammar
        assert grammar is not None
        matcher = compiler.new_matcher(grammar)
        return all(matcher.consume_token(token) for token in text.encode()) and matcher.is_accepting()

    async with open_api(engine, tool_call_parser="hermes") as api:
        for syntax, definition in (("lark", PATCHES), ("regex", lark_to_regex(PATCHES))):
            form = {"type": "grammar", "syntax": syntax, "definition": definition}
            tools = [{"type": "custom", "name": "patch", "format": form}]
            for choice in ("auto", "required"):
                answer = await api.http.post(
                    "/v1/responses", json={"input": "x", "tools": tools, "tool_choice": choice}
                )
                assert answer.status_code == 200, answer.text
                assert "x-ignored-params" not in answer.headers
                assert answer.json()["output"][0]["input"] == FITS[0]
                assert all(fits(call(text)) for text in FITS)
                assert not any(fits(call(text)) for text in FITS_NOT)
                assert fits("Hello") is (choice == "auto"), "text without a call is free"


async def test_custom_tool_grammar_applies_in_non_json_call_format() -> None:
    engine = FakeEngine(scripted(b"x", 258), eos=[258], max_model_len=4096)
    form = {"type": "grammar", "syntax": "lark", "definition": PATCHES}
    body = {"input": "x", "tools": [{"type": "custom", "name": "patch", "format": form}]}
    async with open_api(engine, tool_call_parser="qwen3_coder") as api:
        answer = await api.http.post("/v1/responses", json=body)
        assert answer.status_code == 200, answer.text
        assert "x-ignored-params" not in answer.headers
        grammar = engine.seen[-1].params.grammar
        assert grammar is not None
        named = byte_level_tokenizer()
        compiler = GrammarCompiler(make_grammar_vocabulary(named.tokenizer, VOCAB_SIZE, [258]))
        for text in (*FITS, *FITS_NOT):
            written = (
                f"<tool_call>\n<function=patch>\n<parameter=input>\n{text}\n</parameter>\n</function>\n</tool_call>"
            )
            matcher = compiler.new_matcher(grammar)
            allowed = all(matcher.consume_token(token) for token in written.encode()) and matcher.is_accepting()
            assert allowed is (text in FITS), text
        prompt_text = bytes(token for token in engine.seen[-1].prompt_ids if token < 256).decode()
        assert "*** Begin" in prompt_text


async def test_custom_tool_grammar_rejected_when_form_cannot_enforce_patterns() -> None:
    engine = FakeEngine(scripted(b"x", 258), eos=[258], max_model_len=4096)
    form = {"type": "grammar", "syntax": "lark", "definition": PATCHES}
    body = {"input": "x", "tools": [{"type": "custom", "name": "patch", "format": form}]}
    async with open_api(engine, chat_template=OWN["escaped_attributes"]) as api:
        answer = await api.http.post("/v1/responses", json=body)
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "tools"
        assert "tools[0].format: the grammar of patch" in answer.json()["error"]["message"]
        free = await api.http.post("/v1/responses", json={**body, "tool_choice": "none"})
        assert free.status_code == 200, "no call is made"
