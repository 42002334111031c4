"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's API."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, StringConstraints

from quire.engine.common.request_params import MAX_STOP_STRINGS
from quire.server.protocol.chat_translation import TranslatableBody
from quire.server.protocol.field_limits import (
    MAX_CONTENT_PARTS,
    MAX_MESSAGES,
    MAX_SESSION_ID_LENGTH,
    MAX_TOOLS,
    MaxEntries,
    TextOrList,
    TokenLimit,
)
from quire.server.protocol.request_bodies import BodyModel
from quire.server.protocol.tools import ToolNameText


class CacheControl(BodyModel):
    type: Literal["ephemeral"] = "ephemeral"
    ttl: Literal["5m", "1h"] = "5m"


class CacheableBlock(BodyModel):
    """cache_control says how long to keep the prompt up to the block's end."""

    cache_control: CacheControl | None = None


CACHE_TTL_SECONDS = {"5m": 300.0, "1h": 3600.0}


class TextBlock(CacheableBlock):
    type: Literal["text"]
    text: str


class Base64Source(BodyModel):
    type: Literal["base64"]
    data: str
    media_type: str = ""


class UrlSource(BodyModel):
    type: Literal["url"]
    url: str


class ImageBlock(CacheableBlock):
    type: Literal["image"]
    source: Annotated[Base64Source | UrlSource, Field(discriminator="type")]

    @property
    def url(self) -> str:
        source = self.source
        return source.url if isinstance(source, UrlSource) else f"data:{source.media_type};base64,{source.data}"


class ThinkingBlock(BodyModel):
    type: Literal["thinking"]
    thinking: str


class RedactedThinkingBlock(BodyModel):
    """This server cannot read it, and leaves it out of the prompt."""

    type: Literal["redacted_thinking"]


class ToolUseBlock(CacheableBlock):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


ToolResultContent = Annotated[
    list[Annotated[TextBlock | ImageBlock, Field(discriminator="type")]], MaxEntries(MAX_CONTENT_PARTS)
]


class ToolResultBlock(CacheableBlock):
    type: Literal["tool_result"]
    tool_use_id: str
    content: TextOrList[ToolResultContent] = ""
    is_error: bool = False


ContentBlock = Annotated[
    TextBlock | ImageBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock | ToolResultBlock,
    Field(discriminator="type"),
]
ContentBlocks = Annotated[list[ContentBlock], MaxEntries(MAX_CONTENT_PARTS)]


class InputMessage(BodyModel):
    role: Literal["user", "assistant", "system"]
    content: TextOrList[ContentBlocks]


class InputTool(CacheableBlock):
    """The caller's own tool; Anthropic's server tools do not exist here."""

    type: Literal["custom"] = "custom"
    name: ToolNameText
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None


class AnyChoice(BodyModel):
    type: Literal["auto", "any"]
    disable_parallel_tool_use: bool = False


class NamedChoice(BodyModel):
    type: Literal["tool"]
    name: str
    disable_parallel_tool_use: bool = False


class NoChoice(BodyModel):
    type: Literal["none"]


class Thinking(BodyModel):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = Field(None, ge=1, lt=2**31)


class OutputFormat(BodyModel):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(BodyModel):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class CountTokensRequest(TranslatableBody):
    messages: Annotated[list[InputMessage], MaxEntries(MAX_MESSAGES), Field(min_length=1)]
    system: TextOrList[Annotated[list[TextBlock], MaxEntries(MAX_CONTENT_PARTS)]] = ""
    tools: Annotated[list[InputTool], MaxEntries(MAX_TOOLS)] = Field(default_factory=list)
    tool_choice: Annotated[AnyChoice | NamedChoice | NoChoice, Field(discriminator="type")] | None = None
    thinking: Thinking | None = None
    """If missing, the model does not think, as in Anthropic's API, unless its template cannot turn thinking off."""
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    cache_control: CacheControl | None = None

    @property
    def max_cache_seconds(self) -> float | None:
        """Longest time that a block asks for; None if no block has cache_control. The whole prompt is kept, whichever
        block asks.
        """
        texts = [self.system, *(message.content for message in self.messages)]
        blocks = [block for text in texts if not isinstance(text, str) for block in text]
        markable = [self, *self.tools, *(block for block in blocks if isinstance(block, CacheableBlock))]
        ttls = [CACHE_TTL_SECONDS[each.cache_control.ttl] for each in markable if each.cache_control is not None]
        return max(ttls, default=None)

    @property
    def effective_output_format(self) -> OutputFormat | None:
        config_format = None if self.output_config is None else self.output_config.format
        return config_format or self.output_format

    @property
    def thinking_effort(self) -> str | None:
        return None if self.output_config is None else self.output_config.effort

    @property
    def allows_parallel_tool_calls(self) -> bool:
        return not getattr(self.tool_choice, "disable_parallel_tool_use", False)


class Diagnostics(BodyModel):
    previous_message_id: Annotated[str, StringConstraints(max_length=MAX_SESSION_ID_LENGTH)] | None = None


class MessagesRequest(CountTokensRequest):
    chat_field_aliases: ClassVar[Mapping[str, str]] = {
        "stop": "stop_sequences",
        "max_completion_tokens": "max_tokens",
        "response_format": "output_config.format",
    }

    max_tokens: TokenLimit
    stop_sequences: Annotated[list[str], MaxEntries(MAX_STOP_STRINGS)] = Field(default_factory=list)
    temperature: float | None = Field(None, ge=0, le=1)
    top_p: float | None = None
    top_k: int | None = Field(None, lt=2**31)
    stream: bool = False
    metadata: dict[str, Any] | None = None
    """Has no effect."""
    diagnostics: Diagnostics | None = None
    """If set, later messages can be compared with this one."""
