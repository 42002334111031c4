from __future__ import annotations

import re

from quire.server.formats.tools.tool_parser import ToolFormat, ToolParser, ToolsByName

PIECE = re.compile(r"[^>\n}]{0,255}[>\n}]|[^>\n}]{256}")
"""Pieces have fixed limits, so that a failure's position does not depend on how text arrives."""


class CallTrial:
    def __init__(self, format: ToolFormat, tools: ToolsByName) -> None:
        self._parser = ToolParser(format, tools)
        self._tools = tools
        self.has_failed = False
        self.num_read = 0

    def parse_calls_up_to(self, text: str, count: int) -> int:
        """Parses at most `count` characters of the unread `text`, and returns how many it parsed."""
        begin = self.num_read
        while not self.has_failed and (piece := PIECE.match(text, self.num_read - begin, count)) is not None:
            self._try_piece(piece[0])
        return self.num_read - begin

    def finish_trial(self, text: str) -> bool:
        self._try_piece(text, final=True)
        return not self.has_failed and self._parser.all_complete

    def _try_piece(self, piece: str, *, final: bool = False) -> None:
        content, calls = self._parser.extract_tool_calls(piece, final)
        names = [call.name for call in calls if call.name is not None]
        self.has_failed = bool(content.strip()) or not self._tools.keys() >= set(names)
        if not self.has_failed:
            self.num_read += len(piece)
