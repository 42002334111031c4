"""What a call has so far, of which the rest goes on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec


class End(msgspec.Struct, frozen=True, array_like=True):
    """How a choice ended, as the engine said it."""

    reason: Literal["stop", "length"]
    stop_reason: int | str | None
    with_token: bool
    """Whether that came with its last token, not behind it."""


class Progress(msgspec.Struct):
    """What a call has so far, by choice. The one that grows is the event loop's."""

    ids: list[list[int]] = []
    """The tokens."""
    cached: list[int] = []
    """How many tokens of its prompt were cached when it began, as its caller was told."""

    ends: list[End | None] = []
    """None: a choice has not ended. Of journals of before, and where log probabilities are asked for: empty."""

    @property
    def count(self) -> int:
        return sum(map(len, self.ids))

    def copy(self) -> Progress:
        return Progress([list(ids) for ids in self.ids], list(self.cached), list(self.ends))

    def take(self, choice: int, place: int, ids: Sequence[int], end: End | None) -> None:
        """Tokens of a choice from this place on, some of which may be known; beyond a gap they are left out."""
        if choice < len(self.ids) and place <= (count := len(self.ids[choice])):
            self.ids[choice] += ids[count - place :]
            if end is not None and choice < len(self.ends) and len(self.ids[choice]) == place + len(ids):
                self.ends[choice] = end
