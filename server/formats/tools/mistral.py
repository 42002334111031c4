"""Mistral's [TOOL_CALLS][{"name": …, "arguments": {…}}] and, with newer tokenizers, [TOOL_CALLS]name[ARGS]{…}."""

from __future__ import annotations

import re
import secrets
import string
from collections.abc import Sequence

from quire.server.formats.tools.format import Token, Tool, ToolFormat, Tools
from quire.server.formats.tools.json_calls import read_arguments, read_call
from quire.server.formats.tools.lark import arguments_of, grammar_of, json_call, text
from quire.server.formats.tools.sink import Sink
from quire.server.formats.tools.source import Source, Steps

NAME = re.compile(r"\s*([\w.:/-]+)\s*(?:\[CALL_ID\]\w*)?(?:\[ARGS\])?")
ID_CHARACTERS = string.ascii_letters + string.digits


class Mistral(ToolFormat):
    """The list form: Mistral 7B v0.3, Nemo, Large 2."""

    markers = ("[TOOL_CALLS]",)
    other_markers = ("[ARGS]", "[CALL_ID]")

    def read_calls(self, source: Source, sink: Sink, tools: Tools, marker: str) -> Steps[bool]:
        listed = yield from source.word()
        if listed != "[":
            return (yield from self._read_named(source, sink))
        yield from source.follows("[")
        read = 0
        while (yield from read_call(source, sink)):
            read += 1
            if not (yield from source.follows(",")):
                break
        if read:
            yield from source.follows("]")
        return read > 0

    def _read_named(self, source: Source, sink: Sink) -> Steps[bool]:
        """name[ARGS]{…}, name[CALL_ID]id[ARGS]{…} or name{…}"""
        head = yield from source.until(("{",))
        if head is None:
            return False
        name = NAME.fullmatch(head[0].rstrip())
        if name is None:
            return False
        source.give_back("{")
        sink.open(name[1])
        yield from read_arguments(source, sink)
        return True

    def grammar(self, tools: Sequence[Tool], many: bool, token: Token, *, must: bool = True) -> str:
        before = [token("[TOOL_CALLS]"), text("[")]
        return grammar_of(
            [json_call(tool) for tool in tools], many, before=before, between=[text(", ")], after=[text("]")], must=must
        )

    def new_id(self) -> str:
        """An id of nine letters and digits: Mistral's templates refuse all others."""
        return "".join(secrets.choice(ID_CHARACTERS) for _ in range(9))


class MistralNamed(Mistral):
    """The form with [ARGS]: Mistral Small 3.2, Devstral, Ministral 3.

    Both forms are read; a grammar allows this one alone.
    """

    def grammar(self, tools: Sequence[Tool], many: bool, token: Token, *, must: bool = True) -> str:
        calls = [[text(tool.name), token("[ARGS]"), arguments_of(tool)] for tool in tools]
        begin = token("[TOOL_CALLS]")
        return grammar_of(calls, many, before=[begin], between=[begin], must=must)
