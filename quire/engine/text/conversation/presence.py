"""Looks for the texts of a conversation in what a chat template made of it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

from markupsafe import escape

from quire.engine.text.conversation.units import Message, calls_of, function_of

_THOUGHT_ENDS = ("</think>", "[/THINK]", "</thinking>", "</seed:think>")
"""Text before the last of these in an assistant's content is earlier reasoning, which templates drop on purpose."""
_WORD = re.compile(r"[A-Za-z0-9]+")
_LOOKED_AT = 200
"""Characters of an argument in which a word is looked for."""


def missing(text: str, messages: Sequence[Message]) -> list[int]:
    """The indices of the messages that have a text which the rendered `text` does not show."""
    place = 0
    found = []
    for index, message in enumerate(messages):
        content = message.get("content")
        for each in [content] if isinstance(content, str) else _part_texts(content):
            each = each.strip()  # many templates trim
            start = text.find(each, place)
            if start >= 0:
                place = start + len(each)
            elif not shows(text, each, spoken=message.get("role") == "assistant"):
                found.append(index)
        words = list(_argument_words(message)) if message.get("tool_calls") else []
        if words and not any(word in text for word in words):
            found.append(index)
    return found


def shows(text: str, wanted: str, *, spoken: bool = False) -> bool:
    """True if `text` has `wanted`, trimmed or escaped as in JSON as it may be. `spoken`: by an assistant."""
    if spoken:
        for end in _THOUGHT_ENDS:
            wanted = wanted.rpartition(end)[2]
    wanted = wanted.strip()
    if wanted in text:
        return True
    if any(json.dumps(wanted, ensure_ascii=ascii)[1:-1] in text for ascii in (False, True)):
        return True
    if str(escape(wanted)) in text:
        return True
    return _shows_lines(text, wanted)


def _shows_lines(text: str, wanted: str) -> bool:
    """True if all lines are there in order: templates may indent them, or cut a text at marks of their own."""
    place = 0
    for line in wanted.splitlines():
        line = line.strip()
        if not line:
            continue
        found = text.find(line, place)
        if found < 0:
            return False
        place = found + len(line)
    return True


def _part_texts(content: Any) -> list[str]:
    return [part["text"] for part in content or () if isinstance(part, dict) and isinstance(part.get("text"), str)]


def _argument_words(message: Message) -> Iterator[str]:
    """A word of each text in the arguments of a message's calls, as templates write them in many ways. That a template
    shows all arguments is known from specimens."""
    rest: list[Any] = [function_of(call).get("arguments") for call in calls_of(message)]
    while rest:
        value = rest.pop()
        if isinstance(value, str):
            word = _WORD.search(value, 0, _LOOKED_AT)
            if word is not None:
                yield word[0]
        elif isinstance(value, list):
            rest += value
        elif isinstance(value, dict):
            rest += value.values()
