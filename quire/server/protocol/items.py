"""The items of OpenAI's Responses API that a request may have as its input."""

from __future__ import annotations

import base64
import binascii
import json
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from quire.server.protocol.bounds import MAX_MESSAGES, MAX_PARTS, AtMost, TextOr
from quire.server.protocol.common import Given


def full_name(namespace: str, name: str) -> str:
    """What the model calls a tool."""
    return f"{namespace}.{name}" if namespace else name


def sealed(thought: str) -> str:
    """The encrypted_content of a reasoning item: its text in encoded form, for the client to send back. It is not
    secret."""
    return base64.b64encode(thought.encode()).decode()


def unsealed(text: str) -> str:
    """The text; empty for what another server wrote."""
    try:
        return base64.b64decode(text, validate=True).decode()
    except (binascii.Error, ValueError):
        return ""


class TextContent(Given):
    type: Literal["input_text", "output_text", "text", "summary_text", "reasoning_text"]
    text: str


class JsonContent(Given):
    type: Literal["input_json"]
    data: dict[str, Any] | list[Any]

    @property
    def text(self) -> str:
        return json.dumps(self.data, ensure_ascii=False)


class Refusal(Given):
    type: Literal["refusal"]
    refusal: str

    @property
    def text(self) -> str:
        return self.refusal


class ImageContent(Given):
    type: Literal["input_image"]
    image_url: str
    detail: Literal["auto", "low", "high", "original"] = "auto"


Content = Annotated[
    list[Annotated[TextContent | JsonContent | Refusal, Field(discriminator="type")]], AtMost(MAX_PARTS)
]
MessagePart = TextContent | JsonContent | Refusal | ImageContent
MessageContent = Annotated[list[Annotated[MessagePart, Field(discriminator="type")]], AtMost(MAX_PARTS)]


class Message(Given):
    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: TextOr[MessageContent]


class FunctionCall(Given):
    type: Literal["function_call"]
    call_id: str
    name: str
    namespace: str = ""
    arguments: str


class CustomToolCall(Given):
    type: Literal["custom_tool_call"]
    call_id: str
    name: str
    namespace: str = ""
    input: str


class CallOutput(Given):
    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: str
    output: TextOr[MessageContent]


class Reasoning(Given):
    """The content, what encrypted_content carries, or else the summary."""

    type: Literal["reasoning"]
    summary: Content = Field(default_factory=list)
    content: Content = Field(default_factory=list)
    encrypted_content: str = ""


def type_of(given: Any) -> Any:
    """The type of an item; a message may omit it."""
    return given.get("type") or "message" if isinstance(given, dict) else getattr(given, "type", None)


Item = Annotated[
    Annotated[Message, Tag("message")]
    | Annotated[FunctionCall, Tag("function_call")]
    | Annotated[CustomToolCall, Tag("custom_tool_call")]
    | Annotated[CallOutput, Tag("function_call_output")]
    | Annotated[CallOutput, Tag("custom_tool_call_output")]
    | Annotated[Reasoning, Tag("reasoning")],
    Discriminator(type_of),
]
Items = Annotated[list[Item], AtMost(MAX_MESSAGES)]


class ItemReference(Given):
    """An item that is stored."""

    type: Literal["item_reference"] = "item_reference"
    id: str


def _reference_or_item(given: Any) -> str:
    if isinstance(given, dict):
        named = given.get("type") == "item_reference"
        return "[reference]" if named or (not given.get("type") and given.keys() == {"id"}) else "[item]"
    return "[reference]" if isinstance(given, ItemReference) else "[item]"


ItemOrReference = Annotated[
    Annotated[Item, Tag("[item]")] | Annotated[ItemReference, Tag("[reference]")], Discriminator(_reference_or_item)
]
ItemsOrReferences = Annotated[list[ItemOrReference], AtMost(MAX_MESSAGES)]
InputWithReferences = TextOr[ItemsOrReferences]
Input = TextOr[Items]
