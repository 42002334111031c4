"""The content of messages: a text, or parts of which some are images."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Content = str | list[dict[str, Any]]
IMAGE_PARTS = ("image", "image_pil", "image_url")
"""What the types of parts that are images are called."""


def for_template(parts: Sequence[dict[str, Any]] | None) -> Content:
    """Parts as templates expect them: joined to one string where all are text; null becomes "", as templates
    concatenate content without a check."""
    if not any(part.get("type") in IMAGE_PARTS for part in parts or ()):
        return "\n".join(map(text_of, parts or ()))
    return [
        {"type": "image"} if part.get("type") in IMAGE_PARTS else {"type": "text", "text": text_of(part)}
        for part in parts or ()
    ]


def text_of(part: dict[str, Any]) -> str:
    """The text of a part that is no image; a refusal has it under a name of its own."""
    text: str = part["refusal"] if part.get("text") is None and "refusal" in part else part["text"]
    return text


def in_parts(turn: dict[str, Any]) -> dict[str, Any]:
    """A message whose content is parts."""
    content = turn.get("content")
    return {**turn, "content": [{"type": "text", "text": content}]} if isinstance(content, str) else turn


def joined(between: str, *contents: Content) -> Content:
    """Contents behind one another, those that are not empty."""
    given = [each for each in contents if each]
    if all(isinstance(each, str) for each in given):
        return between.join(str(each) for each in given)
    parts = [[{"type": "text", "text": f"{each}{between}"}] if isinstance(each, str) else each for each in given]
    return [part for each in parts for part in each]
