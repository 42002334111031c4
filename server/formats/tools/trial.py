"""Tells whether a text is nothing but calls: for calls that stand where others are not looked for."""

from __future__ import annotations

import re

from quire.server.formats.tools.format import ToolFormat, ToolParser, Tools

PIECE_END = re.compile(r"[>\n}]")
"""The text is read in pieces up to one of these, so that the place where it fails does not depend on how it came."""


class CallTrial:
    """Reads a text that begins with a call's marker."""

    def __init__(self, format: ToolFormat, tools: Tools) -> None:
        self._parser = ToolParser(format, tools)
        self._tools = tools
        self.failed = False
        """Something else stands there than calls of these tools."""
        self.read = 0
        """Characters up to the piece that failed, or is to come."""
        self._searched = 0
        """Characters among which no other piece ends."""

    def push(self, text: str, count: int) -> None:
        """`text`: all that has come; `count`: how many of its first characters are to be read."""
        while not self.failed:
            end = PIECE_END.search(text, max(self.read, self._searched), count)
            if end is None:
                self._searched = max(self._searched, count)
                return
            self._push(text[self.read : end.end()])

    def finish(self, text: str, count: int) -> bool:
        """Whether these characters are complete calls."""
        self.push(text, count)
        if not self.failed:
            self._push(text[self.read : count], final=True)
        return not self.failed and self._parser.all_complete

    def _push(self, piece: str, *, final: bool = False) -> None:
        content, calls = self._parser.push(piece, final)
        names = [call.name for call in calls if call.name is not None]
        self.failed = bool(content.strip()) or not self._tools.keys() >= set(names)
        if not self.failed:
            self.read += len(piece)
