"""Tool calls in code blocks, which small models write although the template shows another form."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from quire.server.formats.tools.json_calls import JsonCallKeys, read_json_call
from quire.server.formats.tools.text_source import ParserSteps, TextSource
from quire.server.formats.tools.tool_call_sink import ToolCallSink

CODE_FENCE = "```"
FENCE_LABELS = ("", "json", "tool_call", "tool_calls", "tool")
_LONGEST_LABEL = 16


@dataclass(frozen=True)
class CodeBlockKeys(JsonCallKeys):
    """Requires an object as arguments, because JSON in example code often has a name but no arguments."""

    def name_and_arguments(self, call: dict[str, Any]) -> tuple[Any, Any]:
        name, arguments = super().name_and_arguments(call)
        return (name, arguments) if isinstance(arguments, dict) else (None, None)


BLOCK_KEYS = CodeBlockKeys()


class CodeBlockReader:
    def __init__(self) -> None:
        self._is_inside = False

    def read_fenced_calls(
        self, source: TextSource, sink: ToolCallSink, names: frozenset[str], before: str
    ) -> ParserSteps[bool]:
        """`before`: text before the fence."""
        if before.rpartition("\n")[2].strip():
            return False  # the fence is within a line
        if self._is_inside:
            self._is_inside = False
            return False
        self._is_inside = True
        read = yield from source.take_through_first_literal(("\n", "{", "[", "`"), _LONGEST_LABEL)
        if read is None or read[1] == "`" or read[0].strip().lower() not in FENCE_LABELS:
            return False
        if read[1] != "\n":
            source.give_back(read[1])
        yield from source.take_after_space("[")
        if not (yield from read_json_call(source, sink, names, BLOCK_KEYS)):
            return False
        while (yield from _skip_to_another_call(source)):
            source.reset_taken("")
            if not (yield from read_json_call(source, sink, names, BLOCK_KEYS)):
                break
        yield from source.take_after_space("]")
        self._is_inside = not (yield from source.take_after_space(CODE_FENCE))
        return True


def _skip_to_another_call(source: TextSource) -> ParserSteps[bool]:
    for between in (",", ";"):
        yield from source.take_after_space(between)
    return (yield from source.peek_non_space_character()) == "{"
