"""Finds where a stop string ends a text that comes in pieces."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence


class StopStrings:
    """The first stop string that is completed, reading character by character, ends the text before it, or after it
    with `include`. If one character completes two of them, the longer one counts. Text that may turn out to be the
    beginning of one is held back until that is decided."""

    def __init__(self, stop: Sequence[str], *, include: bool) -> None:
        self._stop = sorted(stop)
        self._longest = max(map(len, stop), default=0)
        self._include = include
        self.held_back = ""
        """Text that may be the beginning of a stop string."""

    def search(self, new_text: str) -> tuple[str, str | None]:
        """The text that can be given out, and the stop string that ended it, if any."""
        text = self.held_back + new_text
        found: tuple[int, int, str] | None = None
        for stop in self._stop:
            start = text.find(stop)
            if start >= 0 and (found is None or (start + len(stop), start) < found[:2]):
                found = (start + len(stop), start, stop)
        if found is not None:
            end, start, stop = found
            self.held_back = ""
            return text[: end if self._include else start], stop
        ready = self._begins_stop(text)
        self.held_back = text[ready:]
        return text[:ready], None

    def finish(self) -> str:
        """The text that was held back: no more will come."""
        rest, self.held_back = self.held_back, ""
        return rest

    def _begins_stop(self, text: str) -> int:
        """Where the longest suffix of `text` begins that is the beginning of a stop string; its length if none is."""
        for start in range(max(0, len(text) - self._longest + 1), len(text)):
            suffix = text[start:]
            at = bisect_left(self._stop, suffix)  # What begins with the suffix sorts right after it.
            if at < len(self._stop) and self._stop[at].startswith(suffix):
                return start
        return len(text)
