from __future__ import annotations

from bisect import bisect_right

import msgspec

from quire.engine.common import clock
from quire.engine.text.detokenizer import TextDelta
from quire.server.generation.resolved_request import LineRule


class LineLimiter:
    """The deltas must have token offsets."""

    def __init__(self, rule: LineRule) -> None:
        self._rule = rule
        self._deadline: float | None = None
        self._indent: int | None = None
        """Indentation so far; None after the current line's indentation, and in the first line."""
        self._num_characters = 0
        self._num_ids = 0
        self._num_offsets = 0

    def cut_delta(self, delta: TextDelta) -> TextDelta | None:
        """Returns the answer's last delta, cut after the token that ends it, or None if the answer continues."""
        cut = self._find_cut(delta.text)
        if cut is None:
            self._num_characters += len(delta.text)
            self._num_ids += delta.num_used_ids
            self._num_offsets += len(delta.offsets)
            return None
        length, ending_position = cut
        num_offsets = bisect_right(delta.offsets, self._num_characters + ending_position)
        return msgspec.structs.replace(
            delta,
            text=delta.text[:length],
            offsets=delta.offsets[:num_offsets],
            num_used_ids=max(0, self._num_offsets + num_offsets - self._num_ids),
        )

    def _find_cut(self, text: str) -> tuple[int, int] | None:
        """Returns the answer's length in `text` and the position of the character that ends it, or None."""
        now = clock.monotonic()
        if self._deadline is None and self._rule.max_seconds is not None:
            self._deadline = now + self._rule.max_seconds
        is_late = self._deadline is not None and now > self._deadline
        for position, character in enumerate(text):
            if self._indent is not None:
                if character in " \t":
                    self._indent += 1
                    continue
                if self._indent < self._rule.min_indent:  # also ends at a blank line, as in llama.cpp
                    return position, position
                self._indent = None
            if character == "\n":
                if is_late:
                    return position + 1, position
                self._indent = 0
        return None
