"""<tool_call>{"name": …, "arguments": {…}}</tool_call>: Hermes 2 and 3, Qwen 2.5 and 3, Granite 4, MiMo."""

from __future__ import annotations

from collections.abc import Sequence

from quire.server.formats.tools.format import Token, Tool, ToolFormat, Tools
from quire.server.formats.tools.json_calls import read_call
from quire.server.formats.tools.lark import grammar_of, json_call, text
from quire.server.formats.tools.sink import Sink
from quire.server.formats.tools.source import Source, Steps


class Hermes(ToolFormat):
    markers = ("<tool_call>",)
    other_markers = ("</tool_call>",)

    def read_calls(self, source: Source, sink: Sink, tools: Tools, marker: str) -> Steps[bool]:
        if not (yield from read_call(source, sink)):
            return False
        yield from source.follows("</tool_call>")
        return True

    def grammar(self, tools: Sequence[Tool], many: bool, token: Token, *, must: bool = True) -> str:
        calls = [[text("\n"), *json_call(tool), text("\n"), token("</tool_call>")] for tool in tools]
        begin = token("<tool_call>")
        return grammar_of(calls, many, before=[begin], between=[text("\n"), begin], must=must)
