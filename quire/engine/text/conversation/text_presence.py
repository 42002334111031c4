from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

from markupsafe import escape

from quire.engine.text.conversation.message_units import Message, message_calls, tool_call_function

_REASONING_ENDS = ("</think>", "[/THINK]", "</thinking>", "</seed:think>")
"""Templates drop an assistant's text before the last of these."""
_WORD = re.compile(r"[A-Za-z0-9]+")
_MAX_SEARCHED_CHARACTERS = 200


def find_missing_message_indices(text: str, messages: Sequence[Message]) -> list[int]:
    search_start = 0
    missing_indices = []
    for index, message in enumerate(messages):
        content = message.get("content")
        for each in [content] if isinstance(content, str) else _part_texts(content):
            each = each.strip()  # many templates trim
            start = text.find(each, search_start)
            if start >= 0:
                search_start = start + len(each)
            elif not contains_text(text, each, by_assistant=message.get("role") == "assistant"):
                missing_indices.append(index)
        words = list(_argument_words(message)) if message.get("tool_calls") else []
        if words and not any(word in text for word in words):
            missing_indices.append(index)
    return missing_indices


def contains_text(text: str, expected: str, *, by_assistant: bool = False) -> bool:
    """`expected` may be trimmed, or escaped as JSON or HTML."""
    if by_assistant:
        for end in _REASONING_ENDS:
            expected = expected.rpartition(end)[2]
    expected = expected.strip()
    if expected in text:
        return True
    if any(json.dumps(expected, ensure_ascii=ascii)[1:-1] in text for ascii in (False, True)):
        return True
    if str(escape(expected)) in text:
        return True
    return _contains_lines(text, expected)


def _contains_lines(text: str, expected: str) -> bool:
    """Templates may indent lines, or cut a text at their marks."""
    search_start = 0
    for line in expected.splitlines():
        line = line.strip()
        if not line:
            continue
        start = text.find(line, search_start)
        if start < 0:
            return False
        search_start = start + len(line)
    return True


def _part_texts(content: Any) -> list[str]:
    return [part["text"] for part in content or () if isinstance(part, dict) and isinstance(part.get("text"), str)]


def _argument_words(message: Message) -> Iterator[str]:
    """One word per argument: spellings differ, and probes prove that all are shown."""
    rest: list[Any] = [tool_call_function(call).get("arguments") for call in message_calls(message)]
    while rest:
        value = rest.pop()
        if isinstance(value, str):
            word = _WORD.search(value, 0, _MAX_SEARCHED_CHARACTERS)
            if word is not None:
                yield word[0]
        elif isinstance(value, list):
            rest += value
        elif isinstance(value, dict):
            rest += value.values()
