"""System messages where a chat template takes none: agents send them in the middle of a conversation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from quire.engine.text.chat_template import Shows

Turn = dict[str, Any]


def placed(turns: Sequence[Turn], shows: Shows) -> list[Turn]:
    """The turns, in which texts of a system that the template would refuse or leave out are the user's, in their place.

    `shows`: what the template shows. Content is a list of parts.
    """
    found: list[Turn] = []
    for turn in turns:
        shown = shows.late_system if found else shows.system
        role = "user" if turn["role"] == "system" and not shown else turn["role"]
        if role == "user" and found and found[-1]["role"] == "user":
            found[-1] = {**found[-1], "content": [*found[-1]["content"], *turn["content"]]}
        else:
            found.append({**turn, "role": role})
    return found
