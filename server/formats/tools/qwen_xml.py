"""Qwen3-Coder's <tool_call><function=name><parameter=key>value</parameter></function></tool_call>.

The tool's schema says which values are strings: these are passed on as they come, others when they are complete.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from quire.server.formats.tools import strict_json
from quire.server.formats.tools.format import Schema, Token, Tool, ToolFormat, Tools
from quire.server.formats.tools.lark import grammar_of, text, xml_parameters
from quire.server.formats.tools.sink import Sink
from quire.server.formats.tools.source import Source, Steps, held_back

FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"
NAME = re.compile(r"\s*([\w.:/-]+)\s*")


class QwenXml(ToolFormat):
    """Qwen3-Coder, Qwen 3.5, Step 3.5, Nemotron 3."""

    outer, outer_end = "<tool_call>", "</tool_call>"
    markers = (outer, FUNCTION)
    other_markers = (outer_end,)

    def read_calls(self, source: Source, sink: Sink, tools: Tools, marker: str) -> Steps[bool]:
        if marker != FUNCTION and not (yield from source.follows(FUNCTION)):
            return False
        head = yield from source.until((">",))
        name = NAME.fullmatch(head[0]) if head is not None else None
        if name is None:
            return False
        tool = tools.get(name[1])
        sink.open(name[1])
        sink.arguments("{")
        yield from self._read_parameters(source, sink, tool.parameters if tool is not None else {})
        return True

    def _read_parameters(self, source: Source, sink: Sink, schema: Schema) -> Steps[None]:
        known = schema.get("properties")
        separator = ""
        while (yield from source.follows(PARAMETER)):
            head = yield from source.until((">",))
            if head is None:
                return
            key = head[0].strip()
            sink.arguments(f"{separator}{json.dumps(key, ensure_ascii=False)}: ")
            separator = ", "
            declared = known.get(key, {}) if isinstance(known, dict) else {}
            if not (yield from _read_value(source, sink, is_string(declared))):
                return
        if (yield from source.follows(FUNCTION_END)):
            sink.arguments("}")
            sink.close()
            yield from source.follows(self.outer_end)
        elif (yield from source.follows(self.outer_end)):  # models forget the inner end
            sink.arguments("}")
            sink.close()

    def grammar(self, tools: Sequence[Tool], many: bool, token: Token, *, must: bool = True) -> str:
        begin, end = token(self.outer), [text(f"{FUNCTION_END}\n"), token(self.outer_end)]
        calls = [[text(f"\n{FUNCTION}{tool.name}>\n"), *xml_parameters(tool, is_string), *end] for tool in tools]
        return grammar_of(calls, many, before=[begin], between=[text("\n"), begin], must=must)


class SeedOss(QwenXml):
    """The same format within <seed:tool_call>."""

    outer, outer_end = "<seed:tool_call>", "</seed:tool_call>"
    markers = (outer, FUNCTION)
    other_markers = (outer_end,)


def is_string(schema: Any) -> bool:
    """Whether values of this schema are written as plain text."""
    kind = schema.get("type") if isinstance(schema, dict) else None
    enum = schema.get("enum") if isinstance(schema, dict) else None
    return kind == "string" or (kind is None and isinstance(enum, list) and all(isinstance(one, str) for one in enum))


def _read_value(source: Source, sink: Sink, string: bool) -> Steps[bool]:
    """Pass on a value up to </parameter> as JSON, without the line breaks around it. False when it does not end."""
    while len(source.text) < 1 and not source.closed:
        yield
    if source.text.startswith("\n"):
        source.take(1)
    if string:
        sink.arguments('"')
        while (end := source.text.find(PARAMETER_END)) < 0:
            keep = held_back(source.text, ("\n" + PARAMETER_END, PARAMETER_END))
            sink.arguments(_escaped(source.take(len(source.text) - keep)))
            if source.closed:
                source.take(keep)
                return False
            yield
        sink.arguments(_escaped(source.take(end).removesuffix("\n")) + '"')
    else:
        while (end := source.text.find(PARAMETER_END)) < 0:
            if source.closed:
                return False
            yield
        sink.arguments(_as_json(source.take(end).strip()))
    source.take(len(PARAMETER_END))
    return True


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _as_json(text: str) -> str:
    """The text itself if it is JSON; Python's words as those of JSON; any other text as a string."""
    words = {"True": "true", "False": "false", "None": "null"}
    try:
        strict_json.parse(text)
    except ValueError:
        return words.get(text, json.dumps(text, ensure_ascii=False))
    return text
