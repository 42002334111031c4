"""Input items of OpenAI's Responses API."""

from __future__ import annotations

import base64
import binascii
import json
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from quire.server.protocol.field_limits import MAX_CONTENT_PARTS, MAX_MESSAGES, MaxEntries, TextOrList
from quire.server.protocol.request_bodies import BodyModel


def namespaced_tool_name(namespace: str, name: str) -> str:
    return f"{namespace}.{name}" if namespace else name


def encode_reasoning(reasoning: str) -> str:
    """Returns the reasoning as Base64, not encrypted. Clients send it back."""
    return base64.b64encode(reasoning.encode()).decode()


def decode_reasoning_or_empty(encrypted_content: str) -> str:
    """Returns "" for content from another server."""
    try:
        return base64.b64decode(encrypted_content, validate=True).decode()
    except (binascii.Error, ValueError):
        return ""


class TextContent(BodyModel):
    type: Literal["input_text", "output_text", "text", "summary_text", "reasoning_text"]
    text: str


class JsonContent(BodyModel):
    type: Literal["input_json"]
    data: dict[str, Any] | list[Any]

    @property
    def text(self) -> str:
        return json.dumps(self.data, ensure_ascii=False)


class Refusal(BodyModel):
    type: Literal["refusal"]
    refusal: str

    @property
    def text(self) -> str:
        return self.refusal


class ImageContent(BodyModel):
    type: Literal["input_image"]
    image_url: str
    detail: Literal["auto", "low", "high", "original"] = "auto"


TextContents = Annotated[
    list[Annotated[TextContent | JsonContent | Refusal, Field(discriminator="type")]], MaxEntries(MAX_CONTENT_PARTS)
]
MessagePart = TextContent | JsonContent | Refusal | ImageContent
MessageContent = Annotated[list[Annotated[MessagePart, Field(discriminator="type")]], MaxEntries(MAX_CONTENT_PARTS)]


class Message(BodyModel):
    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: TextOrList[MessageContent]


class FunctionCall(BodyModel):
    type: Literal["function_call"]
    call_id: str
    name: str
    namespace: str = ""
    arguments: str


class CustomToolCall(BodyModel):
    type: Literal["custom_tool_call"]
    call_id: str
    name: str
    namespace: str = ""
    input: str


class CallOutput(BodyModel):
    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: str
    output: TextOrList[MessageContent]


class Reasoning(BodyModel):
    """content takes precedence, then encrypted_content, then summary."""

    type: Literal["reasoning"]
    summary: TextContents = Field(default_factory=list)
    content: TextContents = Field(default_factory=list)
    encrypted_content: str = ""


def item_type(item: Any) -> Any:
    """Messages may omit the type."""
    return item.get("type") or "message" if isinstance(item, dict) else getattr(item, "type", None)


InputItem = Annotated[
    Annotated[Message, Tag("message")]
    | Annotated[FunctionCall, Tag("function_call")]
    | Annotated[CustomToolCall, Tag("custom_tool_call")]
    | Annotated[CallOutput, Tag("function_call_output")]
    | Annotated[CallOutput, Tag("custom_tool_call_output")]
    | Annotated[Reasoning, Tag("reasoning")],
    Discriminator(item_type),
]
InputItems = Annotated[list[InputItem], MaxEntries(MAX_MESSAGES)]


class ItemReference(BodyModel):
    """A stored item."""

    type: Literal["item_reference"] = "item_reference"
    id: str


def _item_or_reference_tag(item: Any) -> str:
    if isinstance(item, dict):
        is_reference = item.get("type") == "item_reference"
        return "[reference]" if is_reference or (not item.get("type") and item.keys() == {"id"}) else "[item]"
    return "[reference]" if isinstance(item, ItemReference) else "[item]"


ItemOrReference = Annotated[
    Annotated[InputItem, Tag("[item]")] | Annotated[ItemReference, Tag("[reference]")],
    Discriminator(_item_or_reference_tag),
]
ItemsOrReferences = Annotated[list[ItemOrReference], MaxEntries(MAX_MESSAGES)]
TextOrItemsOrReferences = TextOrList[ItemsOrReferences]
TextOrItems = TextOrList[InputItems]
