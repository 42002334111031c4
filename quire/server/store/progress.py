"""What a call has so far, of which the rest goes on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec


class ChoiceFinish(msgspec.Struct, frozen=True, array_like=True):
    """How a choice ended, as the engine said it."""

    finish_reason: Literal["stop", "length"]
    stop_reason: int | str | None
    came_with_token: bool
    """Whether that came with its last token, not behind it."""


class CallProgress(msgspec.Struct):
    """What a call has so far, by choice. The one that grows is the event loop's."""

    ids: list[list[int]] = []
    """The tokens."""
    cached: list[int] = []
    """How many tokens of its prompt were cached when it began, as its caller was told."""

    ends: list[ChoiceFinish | None] = []
    """None: a choice has not ended. Of journals of before, and where log probabilities are asked for: empty."""

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.ids))

    def copy(self) -> CallProgress:
        return CallProgress([list(ids) for ids in self.ids], list(self.cached), list(self.ends))

    def merge_tokens(self, choice: int, position: int, ids: Sequence[int], finish: ChoiceFinish | None) -> None:
        """Tokens of a choice from this place on, some of which may be known; beyond a gap they are left out."""
        if choice < len(self.ids) and position <= (num_known := len(self.ids[choice])):
            self.ids[choice] += ids[num_known - position :]
            if finish is not None and choice < len(self.ends) and len(self.ids[choice]) == position + len(ids):
                self.ends[choice] = finish
