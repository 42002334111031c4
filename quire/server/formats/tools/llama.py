from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from typing import Any

from quire.server.formats.tools import strict_json
from quire.server.formats.tools.json_calls import BracketScanner, read_json_call
from quire.server.formats.tools.lark_calls import (
    json_call_expression_sequence,
    keyword_call_expression_sequence,
    lark_calls_grammar,
    quote_lark_string,
)
from quire.server.formats.tools.text_source import MAX_TOOL_NAME_LENGTH, ParserSteps, TextSource
from quire.server.formats.tools.tool_call_sink import ToolCallSink
from quire.server.formats.tools.tool_parser import LiteralEncoder, Tool, ToolFormat, ToolsByName


class LlamaJsonFormat(ToolFormat):
    markers = ("<|python_tag|>", "<|python_start|>")
    other_markers = ("<|python_end|>",)
    bare = "{"
    example = '{"name": "<function-name>", "parameters": <args-json-object>}'

    def read_calls(self, source: TextSource, sink: ToolCallSink, tools: ToolsByName, marker: str) -> ParserSteps[bool]:
        if not (yield from read_json_call(source, sink, tools)):
            return False
        while (yield from self._read_next_call(source, sink, tools)):
            pass
        yield from source.take_after_space("<|python_end|>")
        return True

    def _read_next_call(self, source: TextSource, sink: ToolCallSink, tools: ToolsByName) -> ParserSteps[bool]:
        place = source.save_place()
        for between in (";", ",", *self.other_markers, *self.markers):
            yield from source.take_after_space(between)
        if (yield from source.peek_non_space_character()) == "{" and (yield from read_json_call(source, sink, tools)):
            return True
        source.restore_place(place)
        return False

    def build_calls_grammar(
        self, tools: Sequence[Tool], many: bool, token: LiteralEncoder, *, must: bool = True
    ) -> str:
        calls = [json_call_expression_sequence(tool, in_words=must) for tool in tools]
        return lark_calls_grammar(calls, many, between=[quote_lark_string("; ")], must=must, unlike=r'\s*\{\s*"name"')


class PythonicFormat(ToolFormat):
    """Calls like [weather(city="Rome"), clock()]. Without a marker, calls must begin the answer."""

    markers = ("<|python_start|>", "<|tool_call_start|>")
    other_markers = ("<|python_end|>", "<|tool_call_end|>")
    bare = "["
    example = "[<function-name>(<parameter-name>=<value>, ...)]"

    def read_calls(self, source: TextSource, sink: ToolCallSink, tools: ToolsByName, marker: str) -> ParserSteps[bool]:
        if not (yield from source.take_after_space("[")):
            return False
        read = 0
        while (yield from read_keyword_call(source, sink, tools)):
            read += 1
            if not (yield from source.take_after_space(",")):
                break
        if read:
            yield from source.take_after_space("]")
            for end in self.other_markers:
                yield from source.take_after_space(end)
        return read > 0

    def build_calls_grammar(
        self, tools: Sequence[Tool], many: bool, token: LiteralEncoder, *, must: bool = True
    ) -> str:
        around = {
            "before": [quote_lark_string("[")],
            "between": [quote_lark_string(", ")],
            "after": [quote_lark_string("]")],
        }
        # The bracket must be a separate word, so that the grammar can tell text from calls.
        return lark_calls_grammar(
            [keyword_call_expression_sequence(tool) for tool in tools], many, **around, must=must, unlike=r"\s*\["
        )


PARTIAL_NAME = re.compile(r"\s*[\w.-]*\s*")
CALL_NAME = re.compile(r"\s*([\w.-]+)\s*\(")
CONSTANT_NAMES = {"true": True, "false": False, "null": None}


def read_keyword_call(source: TextSource, sink: ToolCallSink, tools: ToolsByName) -> ParserSteps[bool]:
    """Consumes nothing if it returns False."""
    while PARTIAL_NAME.fullmatch(source.text) and len(source.text) < MAX_TOOL_NAME_LENGTH and not source.is_closed:
        yield
    head = CALL_NAME.match(source.text[:MAX_TOOL_NAME_LENGTH])
    if head is None or head[1] not in tools:
        return False
    scanner = BracketScanner("(", quotes="'\"", outside=None)
    position = scanner.scan(source.text, head.end())
    while not (scanner.is_done or scanner.is_broken or source.is_closed):
        yield
        position = scanner.scan(source.text, position)
    arguments = _keyword_arguments_to_json(source.text[head.end() : position - 1]) if scanner.is_done else None
    if arguments is None:
        return False
    source.take_text(position)
    sink.add_call(head[1], arguments)
    return True


def _keyword_arguments_to_json(text: str) -> str | None:
    try:
        call = _parse_expression(f"f({text}\n)").body
        if not isinstance(call, ast.Call) or call.args:
            return None
        values = {keyword.arg: _literal_value(keyword.value) for keyword in call.keywords}
        return None if None in values else strict_json.write_json(values)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return None


def _parse_expression(text: str) -> ast.Expression:
    try:
        return ast.parse(text, mode="eval")
    except SystemError:
        # CPython 3.11 raises SystemError if the garbage collector logs a traceback meanwhile, because logging parses,
        # too (python/cpython#106905).
        return ast.parse(text, mode="eval")


def _literal_value(node: ast.expr) -> Any:
    if isinstance(node, ast.Name) and node.id in CONSTANT_NAMES:
        return CONSTANT_NAMES[node.id]
    if isinstance(node, ast.List | ast.Tuple):
        return [_literal_value(item) for item in node.elts]
    if isinstance(node, ast.Dict):
        return {_literal_key(key): _literal_value(value) for key, value in zip(node.keys, node.values, strict=True)}
    return ast.literal_eval(node)


def _literal_key(node: ast.expr | None) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    raise ValueError("keys are strings")
