"""Reads streams of the Responses API as a client does; the OpenAI SDK's types check each event."""

from __future__ import annotations

from typing import Any, get_args

from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from tests.server.anthropic import named_events

EVENTS = {
    get_args(event.model_fields["type"].annotation)[0]: TypeAdapter(event)
    for event in get_args(get_args(ResponseStreamEvent)[0])
}
"""Validators of events, by event type."""
RESPONSE: TypeAdapter[Any] = TypeAdapter(Response)


def events_of(text: str) -> list[Any]:
    """Return the events of a stream, which must be valid and numbered from 0."""
    events = named_events(text)
    for number, event in enumerate(events):
        EVENTS[event["type"]].validate_python(event, strict=True)
        assert event["sequence_number"] == number
    return events


def folded(events: list[Any]) -> dict[str, Any]:
    """Return the response that the deltas of a stream add up to. Checks that each `done` event repeats this content,
    that items open and close one after the other, and that the last event holds all of them.
    """
    created, in_progress, *middle, last = events
    assert (created["type"], in_progress["type"]) == ("response.created", "response.in_progress")
    assert created["response"] == in_progress["response"]
    assert (created["response"]["status"], created["response"]["output"]) == ("in_progress", [])
    output: list[dict[str, Any]] = []
    text, logprobs, closed = "", list[Any](), True
    for event in middle:
        kind = event["type"].removeprefix("response.")
        if kind == "output_item.added":
            assert closed
            assert event["output_index"] == len(output)
            output.append(event["item"])
            text, logprobs, closed = "", [], False
            assert event["item"]["status"] == "in_progress"
            continue
        assert not closed
        assert event["output_index"] == len(output) - 1
        if kind == "output_item.done":
            assert {**output[-1], "status": "", **filled(output[-1], text, logprobs)} == {**event["item"], "status": ""}
            output[-1], closed = event["item"], True
            continue
        assert event["item_id"] == output[-1]["id"]
        if kind.endswith(".delta"):
            text += event["delta"]
            logprobs += event.get("logprobs", [])
        elif kind == "content_part.done":
            assert event["part"]["text"] == text
        elif kind.endswith(".done"):
            assert event.get("text", event.get("arguments", event.get("input"))) == text
    assert closed
    assert last["response"]["output"] == output
    assert last["type"] in ("response.completed", "response.incomplete")
    return dict(last["response"])


def filled(item: dict[str, Any], text: str, logprobs: list[Any]) -> dict[str, Any]:
    """Return the fields that an item has once its text is complete."""
    if item["type"] == "message":
        content = {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}
        return {"content": [content]}
    if item["type"] == "reasoning":
        return {"content": [{"type": "reasoning_text", "text": text}]}
    return {"input" if item["type"] == "custom_tool_call" else "arguments": text}


def without_ids(response: dict[str, Any]) -> dict[str, Any]:
    """Return what is the same in two answers to one request."""
    output = [
        {name: value for name, value in item.items() if name not in ("id", "call_id")} for item in response["output"]
    ]
    return {**response, "id": "", "created_at": 0, "completed_at": 0, "output": output}
