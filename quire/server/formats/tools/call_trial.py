"""Tells whether a text is nothing but calls: for calls that stand where others are not looked for."""

from __future__ import annotations

import re

from quire.server.formats.tools.tool_parser import ToolFormat, ToolParser, ToolsByName

PIECE = re.compile(r"[^>\n}]{0,255}[>\n}]|[^>\n}]{256}")
"""The text is read in these pieces, so that the place where it fails does not depend on how it came. They are short:
what is not a whole piece yet is searched again when more comes."""


class CallTrial:
    """Reads a text that begins with a call's marker."""

    def __init__(self, format: ToolFormat, tools: ToolsByName) -> None:
        self._parser = ToolParser(format, tools)
        self._tools = tools
        self.has_failed = False
        """Something else stands there than calls of these tools."""
        self.num_read = 0
        """Characters up to the piece that failed, or is to come."""

    def parse_calls_up_to(self, text: str, count: int) -> int:
        """`text`: what has come and was not read; `count`: how many of its first characters may be read. Returns how
        many were."""
        begin = self.num_read
        while not self.has_failed and (piece := PIECE.match(text, self.num_read - begin, count)) is not None:
            self._try_piece(piece[0])
        return self.num_read - begin

    def finish_trial(self, text: str) -> bool:
        """`text`: the end, which was not read. Whether all of it is complete calls."""
        self._try_piece(text, final=True)
        return not self.has_failed and self._parser.all_complete

    def _try_piece(self, piece: str, *, final: bool = False) -> None:
        content, calls = self._parser.extract_tool_calls(piece, final)
        names = [call.name for call in calls if call.name is not None]
        self.has_failed = bool(content.strip()) or not self._tools.keys() >= set(names)
        if not self.has_failed:
            self.num_read += len(piece)
