"""Llama 3's {"name": …, "parameters": {…}}, with semicolons or lines between several calls; and its pythonic calls."""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from typing import Any

from quire.server.formats.tools import strict_json
from quire.server.formats.tools.format import Token, Tool, ToolFormat, Tools
from quire.server.formats.tools.json_calls import Scanner, read_call
from quire.server.formats.tools.lark import grammar_of, json_call, keyword_call, text
from quire.server.formats.tools.sink import Sink
from quire.server.formats.tools.source import LONGEST_NAME, Source, Steps


class LlamaJson(ToolFormat):
    """Calls have the marker <|python_tag|> or none: an answer that begins with the JSON object of a tool is a call.

    Llama 4 puts <|python_start|> and <|python_end|> around them.
    """

    markers = ("<|python_tag|>", "<|python_start|>")
    other_markers = ("<|python_end|>",)
    bare = "{"
    example = '{"name": "<function-name>", "parameters": <args-json-object>}'

    def read_calls(self, source: Source, sink: Sink, tools: Tools, marker: str) -> Steps[bool]:
        if not (yield from read_call(source, sink, tools)):
            return False
        while (yield from self._read_another(source, sink, tools)):
            pass
        yield from source.follows("<|python_end|>")
        return True

    def _read_another(self, source: Source, sink: Sink, tools: Tools) -> Steps[bool]:
        """Read one more call, behind a semicolon, a comma, white space or its own marker. Else nothing is taken."""
        place = source.here()
        for between in (";", ",", *self.other_markers, *self.markers):
            yield from source.follows(between)
        if (yield from source.word()) == "{" and (yield from read_call(source, sink, tools)):
            return True
        source.back(place)
        return False

    def grammar(self, tools: Sequence[Tool], many: bool, token: Token, *, must: bool = True) -> str:
        calls = [json_call(tool, in_words=must) for tool in tools]
        return grammar_of(calls, many, between=[text("; ")], must=must, unlike=r'\s*\{\s*"name"')


class Pythonic(ToolFormat):
    """[weather(city="Rome"), clock()] with literals of Python or JSON: Llama 3.2 and 4, LFM2.

    Without a marker, only calls at the beginning of an answer are read.
    """

    markers = ("<|python_start|>", "<|tool_call_start|>")
    other_markers = ("<|python_end|>", "<|tool_call_end|>")
    bare = "["
    example = "[<function-name>(<parameter-name>=<value>, ...)]"

    def read_calls(self, source: Source, sink: Sink, tools: Tools, marker: str) -> Steps[bool]:
        if not (yield from source.follows("[")):
            return False
        read = 0
        while (yield from read_keyword_call(source, sink, tools)):
            read += 1
            if not (yield from source.follows(",")):
                break
        if read:
            yield from source.follows("]")
            for end in self.other_markers:
                yield from source.follows(end)
        return read > 0

    def grammar(self, tools: Sequence[Tool], many: bool, token: Token, *, must: bool = True) -> str:
        around = {"before": [text("[")], "between": [text(", ")], "after": [text("]")]}
        # The bracket must be a token of its own: only then can text that begins with one be told from calls.
        return grammar_of([keyword_call(tool) for tool in tools], many, **around, must=must, unlike=r"\s*\[")


BEFORE_NAME_ENDS = re.compile(r"\s*[\w.-]*\s*")
NAME = re.compile(r"\s*([\w.-]+)\s*\(")
WORDS = {"true": True, "false": False, "null": None}


def read_keyword_call(source: Source, sink: Sink, tools: Tools) -> Steps[bool]:
    """Read one f(a=1, b="x") with literals. False, with nothing taken, when something else comes or f is no tool."""
    while BEFORE_NAME_ENDS.fullmatch(source.text) and len(source.text) < LONGEST_NAME and not source.closed:
        yield
    head = NAME.match(source.text[:LONGEST_NAME])
    if head is None or head[1] not in tools:
        return False
    scanner = Scanner("(", quotes="'\"", outside=None)
    position = scanner.scan(source.text, head.end())
    while not (scanner.done or scanner.broken or source.closed):
        yield
        position = scanner.scan(source.text, position)
    arguments = _arguments(source.text[head.end() : position - 1]) if scanner.done else None
    if arguments is None:
        return False
    source.take(position)
    sink.call(head[1], arguments)
    return True


def _arguments(text: str) -> str | None:
    """Keyword arguments as a JSON object; None when they are not keywords with literals."""
    try:
        call = _parse(f"f({text}\n)").body
        if not isinstance(call, ast.Call) or call.args:
            return None
        values = {keyword.arg: _value(keyword.value) for keyword in call.keywords}
        return None if None in values else strict_json.write(values)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return None


def _parse(text: str) -> ast.Expression:
    try:
        return ast.parse(text, mode="eval")
    except SystemError:
        # CPython 3.11 raises it for any text if the garbage collector has a traceback logged meanwhile, because that
        # parses, too (python/cpython#106905).
        return ast.parse(text, mode="eval")


def _value(node: ast.expr) -> Any:
    if isinstance(node, ast.Name) and node.id in WORDS:
        return WORDS[node.id]
    if isinstance(node, ast.List | ast.Tuple):
        return [_value(item) for item in node.elts]
    if isinstance(node, ast.Dict):
        return {_key(key): _value(value) for key, value in zip(node.keys, node.values, strict=True)}
    return ast.literal_eval(node)


def _key(node: ast.expr | None) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    raise ValueError("keys are strings")
