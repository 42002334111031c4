"""Calls in code blocks: what small models write that were told of another form.

Qwen2.5-Coder 1.5B, whose template shows <tool_call>, writes ```json {"name": ..., "arguments": {...}} ``` instead. Such
a block is a call where it names a tool of the request and has arguments, and text otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from quire.server.formats.tools.json_calls import JsonKeys, read_call
from quire.server.formats.tools.sink import Sink
from quire.server.formats.tools.source import Source, Steps

FENCE = "```"
LABELS = ("", "json", "tool_call", "tool_calls", "tool")
"""What may stand behind a fence that begins calls."""
_LONGEST_LABEL = 16


@dataclass(frozen=True)
class BlockKeys(JsonKeys):
    """A call must have its arguments, as an object: an example of a name is none."""

    def parts(self, call: dict[str, Any]) -> tuple[Any, Any]:
        name, arguments = super().parts(call)
        return (name, arguments) if isinstance(arguments, dict) else (None, None)


KEYS = BlockKeys()


class CodeBlocks:
    """Follows the fences of one answer, and reads the calls of blocks that begin with one."""

    def __init__(self) -> None:
        self._inside = False

    def read(self, source: Source, sink: Sink, names: frozenset[str], before: str) -> Steps[bool]:
        """Read what follows a fence; `before`: the text before it. False when that is no call."""
        if before.rpartition("\n")[2].strip():
            return False  # within a line
        if self._inside:
            self._inside = False
            return False
        self._inside = True
        read = yield from source.until(("\n", "{", "[", "`"), _LONGEST_LABEL)
        if read is None or read[1] == "`" or read[0].strip().lower() not in LABELS:
            return False
        if read[1] != "\n":
            source.give_back(read[1])
        yield from source.follows("[")
        if not (yield from read_call(source, sink, names, KEYS)):
            return False
        while (yield from _another(source)):
            source.mark("")
            if not (yield from read_call(source, sink, names, KEYS)):
                break
        yield from source.follows("]")
        self._inside = not (yield from source.follows(FENCE))
        return True


def _another(source: Source) -> Steps[bool]:
    """Whether one more object follows in the block."""
    for between in (",", ";"):
        yield from source.follows(between)
    return (yield from source.word()) == "{"
