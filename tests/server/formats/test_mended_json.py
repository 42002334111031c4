"""Malformed JSON arguments of models are repaired while they stream, or are left unchanged.

Reported at ai-sdk-tool-call-middleware#298, pi#2981, pi#3637, omlx#1931, openclaw#141323,
OpenHands/software-agent-sdk#2488, prism#937, lotti#4310, rhesis#2488.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from quire.server.formats.tools.json_repair import JsonRepairer, repair_json
from quire.server.formats.tools.named_formats import find_tool_format
from quire.server.formats.tools.tool_parser import Tool, ToolParser
from tests.server.formats.test_tools import ROME, TWO_CALLS, all_cuts, in_pieces, values

BS = "\\"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ('{"p": "a\nb\tc\r\x00\x1f"}', {"p": "a\nb\tc\r\x00\x1f"}),
        ('{"a\nb": 1}', {"a\nb": 1}),
        (rf'{{"p": "C:{BS}Users{BS}d+{BS}.py {BS}$x"}}', {"p": r"C:\Users\d+\.py \$x"}),
        (rf'{{"p": "{BS}u12 {BS}uXYZW {BS}u00e9"}}', {"p": r"\u12 \uXYZW é"}),
        ('{"p": "it\\\'s"}', {"p": "it's"}),
        (f'{{"p": "ls {BS}\n -l"}}', {"p": "ls \\\n -l"}),
        (f'{{"view": {BS}n[1, 2]{BS}n{BS}n}}', {"view": [1, 2]}),
        ("{'a': 'it\\'s \"q\"', 'b': True, 'c': None}", {"a": 'it\'s "q"', "b": True, "c": None}),
        ('{"a": 1, "b": [1, 2, ], }', {"a": 1, "b": [1, 2]}),
        ('{"a": 1,, "b": 2}', {"a": 1, "b": 2}),
        ('{"a": [1, {"b": 2}', {"a": [1, {"b": 2}]}),
        ('{"a": {"b": [1, 2}}', {"a": {"b": [1, 2]}}),
        ('{"a": 1]}', {"a": 1}),
        ('{"a": 1 "b" 2 "c": [1 2]}', {"a": 1, "b": 2, "c": [1, 2]}),
        ('{"a": , "b"}', {"a": None, "b": None}),
        ("{city: Rome, days: 007}", {"city": "Rome", "days": "007"}),
        ('{"a": NaN, "b": -Infinity, "c": undefined}', {"a": None, "b": None, "c": None}),
        ('{"a": .5, "b": 5., "c": +5, "d": -.5e3}', {"a": 0.5, "b": 5, "c": 5, "d": -500}),
        ('{\xa0"a":\u3000 1\f}', {"a": 1}),
    ],
)
def test_unambiguous_json_is_repaired_same_at_any_split(text: str, value: Any) -> None:
    expected, _ = JsonRepairer().repair_piece(text, closed=True)
    for pieces in all_cuts(text):
        reader, rest, written = JsonRepairer(), "", ""
        for position, piece in enumerate(pieces):
            rest += piece
            more, count = reader.repair_piece(rest, closed=position == len(pieces) - 1)
            written, rest = written + more, rest[count:]
        assert written == expected, pieces
    reader = JsonRepairer()
    written, _ = reader.repair_piece(text, closed=True)
    assert json.loads(written + ("" if reader.is_done else reader.close_brackets())) == value


@pytest.mark.parametrize(
    "text",
    ["", "5", "[1]", '"x"', '{"a": <b>}', '{"a": "x', '{"a": 1', "{[1]: 2}", '{"a": 1} x', "{1: 1{}}", "{1: 1, {}}"],
)
def test_repair_json_returns_none_for_ambiguous_text(text: str) -> None:
    assert repair_json(text) is None


@settings(deadline=None)
@given(
    value=st.dictionaries(st.text(), values, max_size=4),
    indent=st.sampled_from([None, 2]),
    lengths=st.lists(st.integers(1, 9), min_size=1),
)
def test_valid_json_passes_through_unchanged_without_delay(value: Any, indent: int | None, lengths: list[int]) -> None:
    for ascii_only in (True, False):
        text = json.dumps(value, indent=indent, ensure_ascii=ascii_only)
        reader, rest, written = JsonRepairer(), "", ""
        for piece in in_pieces(text, lengths):
            more, count = reader.repair_piece(rest + piece, closed=False)
            written, rest = written + more, (rest + piece)[count:]
        assert (written, rest, reader.is_done) == (text, "", True)


TOKENS = [*"{}[]\"',:1-. \n<é", BS, "u12", "true", "Tr"]


@settings(deadline=None)
@example(parts=["1", ":", "1", "{", "}", "}"], lengths=[1])
@given(parts=st.lists(st.sampled_from(TOKENS), max_size=16), lengths=st.lists(st.integers(1, 4), min_size=1))
def test_repaired_json_is_valid_and_same_in_pieces(parts: list[str], lengths: list[int]) -> None:
    text = "{" + "".join(parts)
    whole = JsonRepairer()
    expected, count = whole.repair_piece(text, closed=True)
    if whole.is_done or (whole.is_broken and (end := whole.close_brackets()) and (expected := expected + end)):
        json.loads(expected)
    reader, rest, written = JsonRepairer(), "", ""
    pieces = in_pieces(text, lengths)
    for position, piece in enumerate(pieces):
        rest += piece
        if not (reader.is_done or reader.is_broken):
            more, taken = reader.repair_piece(rest, closed=position == len(pieces) - 1)
            written, rest = written + more, rest[taken:]
    written += reader.close_brackets() if reader.is_broken else ""
    assert (written, rest) == (expected, text[count:])


@pytest.mark.parametrize("name", sorted(TWO_CALLS.keys() - {"pythonic", "qwen3_coder", "seed_oss"}))
def test_every_tool_format_repairs_arguments(name: str) -> None:
    format = find_tool_format(name, "")
    assert format is not None
    raw = '{"city": "a\nb' + BS + "d" + BS + '\'", "days": 2,}'
    text = TWO_CALLS[name].replace(ROME, raw)
    tools = {one: Tool(one, {"type": "object"}) for one in ("weather", "clock")}
    for pieces in ([text], list(text)):
        parser, arguments = ToolParser(format, tools), ["", ""]
        for position, piece in enumerate(pieces):
            _, deltas = parser.extract_tool_calls(piece, final=position == len(pieces) - 1)
            for delta in deltas:
                arguments[delta.index] += delta.arguments
        assert [json.loads(one) for one in arguments] == [{"city": "a\nb\\d'", "days": 2}, {}]
        assert parser.all_complete


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ('<tool_call>{"arguments": {"p": "a\nb"}, "name": "clock"}</tool_call>', {"p": "a\nb"}),
        ("<tool_call>{'name': 'clock', 'arguments': {'p': True}}</tool_call>", {"p": True}),
        ('<tool_call>{"name": "clock", "arguments": "{\\"p\\": \\"a\\nb\\"}"}</tool_call>', {"p": "a\nb"}),
        ('<tool_call>{"name": "clock", "arguments": ""}</tool_call>', {}),
        ('<tool_call>{"name": "clock", "arguments": {"p": {"q": 1}</tool_call>', {"p": {"q": 1}}),
    ],
)
def test_malformed_call_json_is_repaired(text: str, arguments: Any) -> None:
    format = find_tool_format("hermes", "")
    assert format is not None
    for pieces in all_cuts(text):
        parser, repaired, content = ToolParser(format, {"clock": Tool("clock", {})}), "", ""
        for position, piece in enumerate(pieces):
            more, deltas = parser.extract_tool_calls(piece, final=position == len(pieces) - 1)
            content += more
            repaired += "".join(delta.arguments for delta in deltas)
        assert (content, json.loads(repaired), parser.all_complete) == ("", arguments, True)
