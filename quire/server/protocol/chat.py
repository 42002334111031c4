"""POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal, get_args

from pydantic import Discriminator, Field, Tag, model_validator

from quire.engine.common.errors import InvalidRequest
from quire.server.protocol.field_limits import (
    MAX_CONTENT_PARTS,
    MAX_DOCUMENTS,
    MAX_MESSAGES,
    ExtraFieldsModel,
    MaxEntries,
    TokenLimit,
)
from quire.server.protocol.request_bodies import GenerationBody
from quire.server.protocol.tools import CustomToolCall, ToolCallList, ToolChoice, ToolList


class TextPart(ExtraFieldsModel):
    type: Literal["text", "input_text", "refusal"] = "text"
    text: str

    @model_validator(mode="before")
    @classmethod
    def check_part_type(cls, part: Any) -> Any:
        kind = part.get("type", "text") if isinstance(part, dict) else "text"
        if kind not in get_args(cls.model_fields["type"].annotation):
            raise InvalidRequest(
                f"messages: only text and images are read, got a content part of type {kind}", param="messages"
            )
        if kind == "refusal" and isinstance(part, dict) and part.get("text") is None and "refusal" in part:
            return {**{name: value for name, value in part.items() if name != "refusal"}, "text": part["refusal"]}
        return part


class ImageUrl(ExtraFieldsModel):
    url: str
    detail: Literal["auto", "low", "high"] | None = None
    """low: few tokens per image."""


class ImagePart(ExtraFieldsModel):
    type: Literal["image_url"]
    image_url: ImageUrl

    @model_validator(mode="before")
    @classmethod
    def wrap_plain_url(cls, part: Any) -> Any:
        if isinstance(part, dict) and isinstance(part.get("image_url"), str):
            return {**part, "image_url": {"url": part["image_url"]}}
        return part


def _content_part_tag(part: Any) -> str:
    kind = part.get("type") if isinstance(part, dict) else getattr(part, "type", None)
    return "[image]" if kind == "image_url" else "[text]"


ContentPart = Annotated[
    Annotated[TextPart, Tag("[text]")] | Annotated[ImagePart, Tag("[image]")], Discriminator(_content_part_tag)
]


class ChatMessage(ExtraFieldsModel):
    """One turn. Other fields (name, tool_call_id, reasoning_content …) go to the template."""

    role: str
    content: str | Annotated[list[ContentPart], MaxEntries(MAX_CONTENT_PARTS)] | None = None
    tool_calls: ToolCallList | None = None

    def to_template_message(self) -> dict[str, Any]:
        turn = self.model_dump(exclude_unset=True)
        if self.tool_calls:  # some templates read type and arguments unconditionally
            turn["tool_calls"] = [
                call.to_function_call() if isinstance(call, CustomToolCall) else call.model_dump(exclude_none=True)
                for call in self.tool_calls
            ]
        return turn


Messages = Annotated[list[ChatMessage], MaxEntries(MAX_MESSAGES), Field(min_length=1)]


class ChatRequest(GenerationBody):
    messages: Messages
    max_completion_tokens: TokenLimit | None = None
    n_predict: int | None = Field(None, ge=-1)
    """llama.cpp's max_tokens. 0: only compute the prompt into the prefix cache."""
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0)
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    """The last message must be the assistant's."""
    echo: bool = False
    """The answer begins with the continued message."""
    chat_template: str | None = None
    """Replaces the model's template, if the operator allows that."""
    add_special_tokens: bool = False
    """False by default, because templates write BOS."""
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    documents: Annotated[list[dict[str, Any]], MaxEntries(MAX_DOCUMENTS)] | None = None
    tools: ToolList = Field(default_factory=list)
    tool_choice: ToolChoice = "auto"
    parallel_tool_calls: bool = True
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    """"none" also sets the template variable enable_thinking to false."""
    include_reasoning: bool = True
    thinking_token_budget: int | None = Field(None, ge=-1, lt=2**31)
    """-1 means no limit."""

    @property
    def token_limit(self) -> tuple[str, int | None]:
        """Name and value of the first limit that is set. The value None means no limit."""
        values = {name: getattr(self, name) for name in ("max_completion_tokens", "max_tokens", "n_predict")}
        return next(((name, value) for name, value in values.items() if value is not None), ("max_tokens", None))

    @property
    def reasoning_template_variables(self) -> dict[str, Any]:
        variables: dict[str, Any] = {}
        if self.reasoning_effort is not None:
            variables["reasoning_effort"] = self.reasoning_effort
        if self.reasoning_effort == "none":
            variables["enable_thinking"] = False
        return variables

    @model_validator(mode="after")
    def check_top_logprobs(self) -> ChatRequest:
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequest("top_logprobs needs logprobs to be true", param="top_logprobs")
        return self

    @model_validator(mode="after")
    def check_continuation(self) -> ChatRequest:
        if self.continue_final_message:
            has_explicit_generation_prompt = (
                self.add_generation_prompt and "add_generation_prompt" in self.model_fields_set
            )
            check_final_message_continuation(self.messages, has_explicit_generation_prompt)
        elif self.echo:
            raise InvalidRequest("echo needs continue_final_message to be true", param="echo")
        return self


def check_final_message_continuation(messages: Sequence[ChatMessage], generation_prompt: bool) -> None:
    """Raises InvalidRequest."""
    if generation_prompt:
        raise InvalidRequest(
            "continue_final_message and add_generation_prompt exclude each other", param="continue_final_message"
        )
    if not messages or messages[-1].role != "assistant":
        raise InvalidRequest(
            "continue_final_message needs the last message to be from the assistant", param="continue_final_message"
        )
