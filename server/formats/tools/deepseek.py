"""DeepSeek's markers: V3 and R1 write the arguments as a JSON code block, V3.1 right behind the name."""

from __future__ import annotations

import re
from collections.abc import Sequence

from quire.server.formats.tools.format import Token, Tool, ToolFormat, Tools
from quire.server.formats.tools.json_calls import read_arguments
from quire.server.formats.tools.lark import arguments_of, grammar_of, text
from quire.server.formats.tools.sink import Sink
from quire.server.formats.tools.source import Source, Steps

CALLS_BEGIN, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL_BEGIN, CALL_END, SEPARATOR = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"
BLOCK_NAME = re.compile(r"\s*([\w.:/-]+)\s*```(?:json)?\s*")


class DeepSeek(ToolFormat):
    """V3 and R1: …begin｜>function<｜tool▁sep｜>name, a code block of JSON, <｜tool▁call▁end｜>."""

    markers = (CALLS_BEGIN,)
    other_markers = (CALLS_END, CALL_BEGIN, CALL_END, SEPARATOR)

    def read_calls(self, source: Source, sink: Sink, tools: Tools, marker: str) -> Steps[bool]:
        read = 0
        while (yield from source.follows(CALL_BEGIN)):
            if not (yield from self._read_call(source, sink)):
                break
            read += 1
            source.mark("")
        if read:
            sink.content(source.taken)
            yield from source.follows(CALLS_END)
        return read > 0

    def _read_call(self, source: Source, sink: Sink) -> Steps[bool]:
        """Read a call of either version; the text behind the separator tells which."""
        first = yield from source.until((SEPARATOR,))
        if first is None:
            return False
        name = first[0].strip()
        fenced = (yield from source.word()) != "{"
        head = yield from source.until(("{",))
        if head is None:
            return False
        if fenced:
            block = BLOCK_NAME.fullmatch(head[0])
            if block is None:
                return False
            name = block[1]
        source.give_back("{")
        sink.open(name)
        yield from read_arguments(source, sink)
        if fenced:
            yield from source.follows("```")
        yield from source.follows(CALL_END)
        return True

    def grammar(self, tools: Sequence[Tool], many: bool, token: Token, *, must: bool = True) -> str:
        begin, end = [token(CALL_BEGIN), text("function"), token(SEPARATOR)], [text("\n```"), token(CALL_END)]
        calls = [[*begin, text(f"{tool.name}\n```json\n"), arguments_of(tool), *end] for tool in tools]
        before, after = [token(CALLS_BEGIN)], [token(CALLS_END)]
        return grammar_of(calls, many, before=before, between=[text("\n")], after=after, must=must)


class DeepSeek31(DeepSeek):
    """V3.1: …begin｜>name<｜tool▁sep｜>{…}<｜tool▁call▁end｜>. Both are read; a grammar allows this one alone."""

    def grammar(self, tools: Sequence[Tool], many: bool, token: Token, *, must: bool = True) -> str:
        begin, separator, end = map(token, (CALL_BEGIN, SEPARATOR, CALL_END))
        calls = [[begin, text(tool.name), separator, arguments_of(tool), end] for tool in tools]
        return grammar_of(calls, many, before=[token(CALLS_BEGIN)], after=[token(CALLS_END)], must=must)
