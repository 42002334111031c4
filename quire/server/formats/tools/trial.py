"""Tells whether a text is nothing but calls: for calls that stand where others are not looked for."""

from __future__ import annotations

import re

from quire.server.formats.tools.format import ToolFormat, ToolParser, Tools

PIECE = re.compile(r"[^>\n}]{0,255}[>\n}]|[^>\n}]{256}")
"""The text is read in these pieces, so that the place where it fails does not depend on how it came. They are short:
what is not a whole piece yet is searched again when more comes."""


class CallTrial:
    """Reads a text that begins with a call's marker."""

    def __init__(self, format: ToolFormat, tools: Tools) -> None:
        self._parser = ToolParser(format, tools)
        self._tools = tools
        self.failed = False
        """Something else stands there than calls of these tools."""
        self.read = 0
        """Characters up to the piece that failed, or is to come."""

    def push(self, text: str, count: int) -> int:
        """`text`: what has come and was not read; `count`: how many of its first characters may be read. Returns how
        many were."""
        begin = self.read
        while not self.failed and (piece := PIECE.match(text, self.read - begin, count)) is not None:
            self._push(piece[0])
        return self.read - begin

    def finish(self, text: str) -> bool:
        """`text`: the end, which was not read. Whether all of it is complete calls."""
        self._push(text, final=True)
        return not self.failed and self._parser.all_complete

    def _push(self, piece: str, *, final: bool = False) -> None:
        content, calls = self._parser.push(piece, final)
        names = [call.name for call in calls if call.name is not None]
        self.failed = bool(content.strip()) or not self._tools.keys() >= set(names)
        if not self.failed:
            self.read += len(piece)
