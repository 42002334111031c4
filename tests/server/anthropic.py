"""Reads streams of Anthropic's Messages API as a client does."""

from __future__ import annotations

import json
from typing import Any

from pydantic_core import from_json

DELTAS = {
    "text": ("text_delta", "text", "text"),
    "thinking": ("thinking_delta", "thinking", "thinking"),
    "tool_use": ("input_json_delta", "partial_json", "input"),
}
"""For each kind of block: the type of its deltas, the field of these deltas, and the field of the block."""


def named_events(text: str) -> list[Any]:
    """Return the events of a stream. Each event's name must equal its type."""
    events = []
    for lines in text.removesuffix("\n\n").split("\n\n"):
        name, data = lines.split("\n")[-2:]
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        events.append(event)
    return events


def folded(events: list[Any]) -> dict[str, Any]:
    """Return the message that a client has at a stream's end. Checks the order of events: blocks open and close one
    after the other, by index, and each delta belongs to the open block.
    """
    first, *blocks, change, stop = [event for event in events if event["type"] != "ping"]
    assert (first["type"], change["type"], stop) == ("message_start", "message_delta", {"type": "message_stop"})
    message = first["message"]
    assert (message["content"], message["stop_reason"]) == ([], None)
    is_open, text = False, ""
    for event in blocks:
        if event["type"] == "content_block_start":
            assert not is_open
            assert event["index"] == len(message["content"])
            is_open, text = True, ""
            message["content"].append(event["content_block"])
            continue
        assert is_open
        assert event["index"] == len(message["content"]) - 1
        block = message["content"][-1]
        kind, field, target = DELTAS[block["type"]]
        if event["type"] == "content_block_delta":
            assert event["delta"]["type"] == kind
            text += event["delta"][field]
            block[target] = from_json(text, allow_partial=True) if kind == "input_json_delta" else text
        else:
            assert event["type"] == "content_block_stop"
            is_open = False
    assert not is_open
    return {**message, **change["delta"], "usage": change["usage"]}


def without_ids(message: dict[str, Any]) -> dict[str, Any]:
    """Return what is the same in two answers to one request."""
    content = [{name: value for name, value in block.items() if name != "id"} for block in message["content"]]
    return {**message, "id": "", "content": content}
