"""From the items of the Responses API to the messages of a chat."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from quire.server.protocol.items import (
    CallOutput,
    Content,
    CustomToolCall,
    FunctionCall,
    ImageContent,
    Item,
    Message,
    MessageContent,
    MessagePart,
    Reasoning,
    full_name,
    unsealed,
)
from quire.server.resolve.translated.as_chat import Turn, add_parts, image_part, note_field, tool_turn


def turns_of(items: Sequence[Item], system: str, *, developer: bool, earlier: int = 0) -> list[Turn]:
    """A chat's messages. developer: whether the template knows that role. earlier: how many of the items precede the
    request's own input.

    Consecutive messages of a user or of the system become one. So does everything that an assistant did before its
    tools answered: reasoning, text and calls.
    """
    turns: list[Turn] = []
    names: dict[str, str] = {}
    if system:
        add_parts(turns, "system", parts_of(system, "instructions"))
        note_field(turns, "instructions")
    for index, item in enumerate(items):
        field = f"input[{index - earlier}]" if index >= earlier else "previous_response_id"
        if isinstance(item, Message) and item.role == "assistant":
            assistant(turns, "tool_calls")["content"] += parts_of(item.content, f"{field}.content")
        elif isinstance(item, Message):
            role = "system" if item.role == "developer" and not developer else item.role
            add_parts(turns, role, parts_of(item.content, f"{field}.content"))
        elif isinstance(item, CallOutput):
            turns.append(tool_turn(item.call_id, result_of(item, f"{field}.output"), names))
        elif isinstance(item, Reasoning):
            if thought := thought_of(item):
                assistant(turns, "reasoning_content", "content", "tool_calls")["reasoning_content"] = thought
        else:
            names[item.call_id] = full_name(item.namespace, item.name)
            assistant(turns).setdefault("tool_calls", []).append(call_of(item))
        note_field(turns, field)
    return turns


def assistant(turns: list[Turn], *before: str) -> Turn:
    """The assistant's turn that an item is part of: the last one, unless it has a field that goes `before`."""
    if not turns or turns[-1]["role"] != "assistant" or any(turns[-1].get(name) for name in before):
        turns.append({"role": "assistant", "content": []})
    return turns[-1]


def call_of(item: FunctionCall | CustomToolCall) -> dict[str, Any]:
    name = full_name(item.namespace, item.name)
    if isinstance(item, FunctionCall):
        return {"id": item.call_id, "type": "function", "function": {"name": name, "arguments": item.arguments}}
    return {"id": item.call_id, "type": "custom", "custom": {"name": name, "input": item.input}}


def thought_of(item: Reasoning) -> str:
    """The text of the thinking. A client that does not keep content sends it back as encrypted_content."""
    told = "\n".join(part.text for part in item.content) or unsealed(item.encrypted_content)
    return told or "\n".join(part.text for part in item.summary)


def texts_of(content: str | Content) -> list[str]:
    return [content] if isinstance(content, str) else [part.text for part in content]


def result_of(item: CallOutput, field: str) -> str | list[Turn]:
    """What a tool returned: text, or parts where some are images."""
    if isinstance(item.output, str):
        return item.output
    if any(isinstance(part, ImageContent) for part in item.output):
        return parts_of(item.output, field)
    return "\n".join(part.text for part in item.output if not isinstance(part, ImageContent))


def parts_of(content: str | MessageContent, field: str) -> list[Turn]:
    """A chat's content; `field`: where the caller has it."""
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    return [part_of(part, f"{field}[{place}]") for place, part in enumerate(content)]


def part_of(part: MessagePart, field: str) -> Turn:
    if not isinstance(part, ImageContent):
        return {"type": "text", "text": part.text}
    detail = "high" if part.detail == "original" else part.detail
    return image_part(part.image_url, f"{field}.image_url", detail=detail)
