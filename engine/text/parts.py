"""The content of messages: a text, or parts of which some are images."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Content = str | list[dict[str, Any]]
IMAGE_PARTS = ("image", "image_pil", "image_url")
"""What the types of parts that are images are called."""
RESERVED = frozenset(("messages", "tools", "documents", "add_generation_prompt"))
"""Template variables that chat_template_kwargs may not set."""
REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
"""Names under which clients send a message's reasoning, and templates read it."""


def for_template(parts: Sequence[dict[str, Any]] | None) -> Content:
    """Parts as templates expect them: joined to one string where all are text; null becomes "", as templates
    concatenate content without a check."""
    if not any(part.get("type") in IMAGE_PARTS for part in parts or ()):
        return "\n".join(part["text"] for part in parts or ())
    return [
        {"type": "image"} if part.get("type") in IMAGE_PARTS else {"type": "text", "text": part["text"]}
        for part in parts or ()
    ]


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


def content_as_thought(message: dict[str, Any]) -> dict[str, Any]:
    """A message that makes calls, its content behind its thinking."""
    if not message.get("tool_calls") or not message.get("content") or not message.get("reasoning_content"):
        return message
    return {
        **message,
        **dict.fromkeys(REASONING_FIELDS, f"{message['reasoning_content']}\n\n{message['content']}"),
        "content": "",
    }
