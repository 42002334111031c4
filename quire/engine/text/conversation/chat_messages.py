from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

Content = str | list[dict[str, Any]]
IMAGE_PART_TYPES = ("image", "image_pil", "image_url")
RESERVED_VARIABLES = frozenset(("messages", "tools", "documents", "add_generation_prompt"))
REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")


def to_template_content(parts: Sequence[dict[str, Any]] | None) -> Content:
    """None becomes "", because templates concatenate content unchecked."""
    if not any(part.get("type") in IMAGE_PART_TYPES for part in parts or ()):
        return "\n".join(map(part_text, parts or ()))
    return [
        {"type": "image"} if part.get("type") in IMAGE_PART_TYPES else {"type": "text", "text": part_text(part)}
        for part in parts or ()
    ]


def part_text(part: dict[str, Any]) -> str:
    text: str = part["refusal"] if part.get("text") is None and "refusal" in part else part["text"]
    return text


def with_content_parts(message: dict[str, Any]) -> dict[str, Any]:
    content = message.get("content")
    return {**message, "content": [{"type": "text", "text": content}]} if isinstance(content, str) else message


def join_contents(separator: str, *contents: Content) -> Content:
    nonempty_contents = [each for each in contents if each]
    if all(isinstance(each, str) for each in nonempty_contents):
        return separator.join(str(each) for each in nonempty_contents)
    parts = [
        [{"type": "text", "text": f"{each}{separator}"}] if isinstance(each, str) else each
        for each in nonempty_contents
    ]
    return [part for each in parts for part in each]


def normalize_message(message: dict[str, Any], *, text_arguments: bool = False) -> dict[str, Any]:
    """Copies the message's reasoning to each missing field of REASONING_FIELDS. Tool arguments become objects or, with
    `text_arguments`, JSON strings. Invalid JSON stays unchanged.
    """
    content = message.get("content")
    result = {**message, "content": content if isinstance(content, str) else to_template_content(content)}
    if not result.get("tool_calls"):
        result.pop("tool_calls", None)
    else:
        result["tool_calls"] = [_convert_arguments(call, as_text=text_arguments) for call in result["tool_calls"]]
    reasoning = next((message[name] for name in REASONING_FIELDS if message.get(name) is not None), None)
    if reasoning is not None:
        result = {**dict.fromkeys(REASONING_FIELDS, reasoning), **result, "reasoning_content": reasoning}
    return {name: value for name, value in result.items() if value is not None}


def _convert_arguments(call: dict[str, Any], *, as_text: bool) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, dict) or isinstance(function.get("arguments"), str) is as_text:
        return call
    arguments = function.get("arguments", {})
    if as_text:
        arguments = json.dumps(arguments, ensure_ascii=False)
    elif isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            return call
    return {**call, "function": {**function, "arguments": arguments}}
