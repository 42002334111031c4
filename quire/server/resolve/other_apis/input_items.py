from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from quire.server.protocol.response_items import (
    CallOutput,
    CustomToolCall,
    FunctionCall,
    ImageContent,
    InputItem,
    Message,
    MessageContent,
    MessagePart,
    Reasoning,
    TextContents,
    decode_reasoning_or_empty,
    namespaced_tool_name,
)
from quire.server.resolve.other_apis.chat_conversion import (
    ChatTurn,
    extend_or_add_turn,
    image_content_part,
    record_caller_field,
    tool_result_turn,
)


def turns_from_items(
    items: Sequence[InputItem], system: str, *, has_developer_role: bool, num_earlier: int = 0
) -> list[ChatTurn]:
    """`num_earlier`: number of items before the request's own. Merges consecutive user or system messages, and an
    assistant's reasoning, text and calls before its tools' answers.
    """
    turns: list[ChatTurn] = []
    names: dict[str, str] = {}
    if system:
        extend_or_add_turn(turns, "system", chat_content_parts(system, "instructions"))
        record_caller_field(turns, "instructions")
    for index, item in enumerate(items):
        field = f"input[{index - num_earlier}]" if index >= num_earlier else "previous_response_id"
        if isinstance(item, Message) and item.role == "assistant":
            get_or_add_assistant_turn(turns, "tool_calls")["content"] += chat_content_parts(
                item.content, f"{field}.content"
            )
        elif isinstance(item, Message):
            role = "system" if item.role == "developer" and not has_developer_role else item.role
            extend_or_add_turn(turns, role, chat_content_parts(item.content, f"{field}.content"))
        elif isinstance(item, CallOutput):
            turns.append(tool_result_turn(item.call_id, tool_output_content(item, f"{field}.output"), names))
        elif isinstance(item, Reasoning):
            if thought := reasoning_text(item):
                get_or_add_assistant_turn(turns, "reasoning_content", "content", "tool_calls")["reasoning_content"] = (
                    thought
                )
        else:
            names[item.call_id] = namespaced_tool_name(item.namespace, item.name)
            get_or_add_assistant_turn(turns).setdefault("tool_calls", []).append(tool_call_from_item(item))
        record_caller_field(turns, field)
    return turns


def get_or_add_assistant_turn(turns: list[ChatTurn], *later_fields: str) -> ChatTurn:
    if not turns or turns[-1]["role"] != "assistant" or any(turns[-1].get(name) for name in later_fields):
        turns.append({"role": "assistant", "content": []})
    return turns[-1]


def tool_call_from_item(item: FunctionCall | CustomToolCall) -> dict[str, Any]:
    name = namespaced_tool_name(item.namespace, item.name)
    if isinstance(item, FunctionCall):
        return {"id": item.call_id, "type": "function", "function": {"name": name, "arguments": item.arguments}}
    return {"id": item.call_id, "type": "custom", "custom": {"name": name, "input": item.input}}


def reasoning_text(item: Reasoning) -> str:
    """Also reads encrypted_content, in which clients send reasoning back if it is not stored."""
    full_text = "\n".join(part.text for part in item.content) or decode_reasoning_or_empty(item.encrypted_content)
    return full_text or "\n".join(part.text for part in item.summary)


def content_texts(content: str | TextContents) -> list[str]:
    return [content] if isinstance(content, str) else [part.text for part in content]


def tool_output_content(item: CallOutput, field: str) -> str | list[ChatTurn]:
    if isinstance(item.output, str):
        return item.output
    if any(isinstance(part, ImageContent) for part in item.output):
        return chat_content_parts(item.output, field)
    return "\n".join(part.text for part in item.output if not isinstance(part, ImageContent))


def chat_content_parts(content: str | MessageContent, field: str) -> list[ChatTurn]:
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    return [chat_content_part(part, f"{field}[{place}]") for place, part in enumerate(content)]


def chat_content_part(part: MessagePart, field: str) -> ChatTurn:
    if not isinstance(part, ImageContent):
        return {"type": "text", "text": part.text}
    detail = "high" if part.detail == "original" else part.detail
    return image_content_part(part.image_url, f"{field}.image_url", detail=detail)
