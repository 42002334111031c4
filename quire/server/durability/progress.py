from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec


class ChoiceFinish(msgspec.Struct, frozen=True, array_like=True):
    finish_reason: Literal["stop", "length"]
    stop_reason: int | str | None
    came_with_token: bool
    """False if the end came separately, after the last token."""


class CallProgress(msgspec.Struct):
    """Each list has an entry per choice. Lists that grow may be changed only by the event loop."""

    ids: list[list[int]] = []
    cached: list[int] = []

    ends: list[ChoiceFinish | None] = []
    """None for an unfinished choice. The list is empty in older journals and for beam searches."""

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.ids))

    def copy(self) -> CallProgress:
        return CallProgress([list(ids) for ids in self.ids], list(self.cached), list(self.ends))

    def merge_tokens(self, choice: int, position: int, ids: Sequence[int], finish: ChoiceFinish | None) -> None:
        """`position`: index of the first of `ids` among the choice's tokens. Drops all tokens if earlier ones are
        missing.
        """
        if choice < len(self.ids) and position <= (num_known := len(self.ids[choice])):
            self.ids[choice] += ids[num_known - position :]
            if finish is not None and choice < len(self.ends) and len(self.ids[choice]) == position + len(ids):
                self.ends[choice] = finish
