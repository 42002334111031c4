"""The turns that a request was translated to, where its chat's template takes them, and where they came from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from quire.engine.text.chat_template import TemplateAbilities
from quire.server.resolve.translated.names import Places

Turn = dict[str, Any]
FIELD = "\0field"
"""A key of an image's part, until it is placed: the caller's name of it. No JSON of ours has such a key."""


def image_part(url: str, field: str, **more: str) -> Turn:
    """A chat's content part, of an image that the caller has in `field`."""
    return {"type": "image_url", "image_url": {"url": url, **more}, FIELD: field}


def placed(turns: Sequence[Turn], shows: TemplateAbilities, places: Places) -> list[Turn]:
    """The turns, in which texts of a system that the template would refuse or leave out are the user's, in their place:
    agents send them in the middle of a conversation. Where its images stand is noted in `places`.

    `shows`: what the template shows. Content is a list of parts, or a tool's text.
    """
    found: list[Turn] = []
    for turn in turns:
        shown = shows.late_system if found else shows.system
        role = "user" if turn["role"] == "system" and not shown else turn["role"]
        if role == "user" and found and found[-1]["role"] == "user":
            found[-1] = {**found[-1], "content": [*found[-1]["content"], *turn["content"]]}
        else:
            found.append({**turn, "role": role})
    for index, turn in enumerate(found):
        for place, part in enumerate(turn["content"] if isinstance(turn["content"], list) else ()):
            if field := part.pop(FIELD, None):
                places[f"messages[{index}].content[{place}].image_url.url"] = field
    return found
