"""POST /v1/responses: OpenAI's Responses API."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, StringConstraints, Tag

from quire.engine.common.errors import InvalidRequest
from quire.server.protocol.chat_translation import CHAT_EXTENSIONS, TranslatableBody
from quire.server.protocol.field_limits import MAX_SESSION_ID_LENGTH, MAX_TOOLS, MaxEntries, TokenLimit
from quire.server.protocol.request_bodies import BodyModel
from quire.server.protocol.response_items import TextOrItemsOrReferences
from quire.server.protocol.tools import ToolNameText

MAX_INCLUDE_ENTRIES = 32
MAX_METADATA_ENTRIES = 16
MAX_IDENTIFIER_LENGTH = 64
"""OpenAI's limit for safety_identifier and prompt_cache_key."""
MAX_ECHOED_BYTES = 1 << 20
"""Limit for instructions, tools and text.format, which open answers hold to repeat them. Agents with a hundred tools
send 100 KB.
"""
INCLUDE_LOGPROBS = "message.output_text.logprobs"
INCLUDE_ENCRYPTED_REASONING = "reasoning.encrypted_content"


class FunctionTool(BodyModel):
    type: Literal["function"]
    name: ToolNameText
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class FreeText(BodyModel):
    type: Literal["text"]


class GrammarFormat(BodyModel):
    type: Literal["grammar"]
    syntax: Literal["lark", "regex"]
    definition: str


class CustomTool(BodyModel):
    """Takes free text."""

    type: Literal["custom"]
    name: ToolNameText
    description: str | None = None
    format: Annotated[FreeText | GrammarFormat, Field(discriminator="type")] | None = None

    @property
    def grammar_format(self) -> GrammarFormat | None:
        return self.format if isinstance(self.format, GrammarFormat) else None


class SearchTool(BodyModel):
    """Agents offer OpenAI's search tools unasked; they are hidden from the model."""

    type: Literal["web_search", "web_search_preview", "tool_search"]


class NamespaceTool(BodyModel):
    """The model sees its tools as NAMESPACE.NAME."""

    type: Literal["namespace"]
    name: ToolNameText
    description: str | None = None
    tools: Annotated[list[Annotated[FunctionTool | CustomTool, Field(discriminator="type")]], MaxEntries(MAX_TOOLS)]


Tool = Annotated[FunctionTool | CustomTool | NamespaceTool | SearchTool, Field(discriminator="type")]


class ChosenTool(BodyModel):
    type: Literal["function", "custom"]
    name: str


class AllowedTools(BodyModel):
    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[ChosenTool], MaxEntries(MAX_TOOLS), Field(min_length=1)]


def _tool_choice_tag(tool_choice: Any) -> Any:
    return "str" if isinstance(tool_choice, str) else tool_choice.get("type") if isinstance(tool_choice, dict) else "{}"


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("str")]
    | Annotated[ChosenTool, Tag("function")]
    | Annotated[ChosenTool, Tag("custom")]
    | Annotated[AllowedTools, Tag("allowed_tools")],
    Discriminator(_tool_choice_tag),
]


class TextFormat(BodyModel):
    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str = "answer"
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class TextConfig(BodyModel):
    format: TextFormat = TextFormat()
    verbosity: Literal["low", "medium", "high"] | None = None


class ReasoningConfig(BodyModel):
    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None


MetadataKey = Annotated[str, StringConstraints(max_length=64)]
MetadataValue = Annotated[str, StringConstraints(max_length=512)]
Metadata = Annotated[dict[MetadataKey, MetadataValue], MaxEntries(MAX_METADATA_ENTRIES)]


class ConversationId(BodyModel):
    id: str


class PromptCacheOptions(BodyModel):
    comparison_response_id: Annotated[str, StringConstraints(max_length=MAX_SESSION_ID_LENGTH)] | None = None
    """Id of an earlier response. The answer's prompt_cache_diagnostics compare its prompt with this request's."""
    mode: Literal["implicit", "explicit"] = "implicit"
    ttl: Literal["30m", "12h"] | None = None
    prewarm: bool = False


class ResponsesRequest(TranslatableBody):
    chat_field_aliases: ClassVar[Mapping[str, str]] = {
        "messages": "input",
        "max_tokens": "max_output_tokens",
        "max_completion_tokens": "max_output_tokens",
        "response_format": "text.format",
        "reasoning_effort": "reasoning.effort",
    }
    accepted_extensions: ClassVar[tuple[str, ...]] = (*CHAT_EXTENSIONS, "top_k", "stop", "include_reasoning")

    input: TextOrItemsOrReferences = ""
    instructions: str | None = None
    max_output_tokens: TokenLimit | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: int = Field(0, ge=0)
    tools: Annotated[list[Tool], MaxEntries(MAX_TOOLS)] = Field(default_factory=list)
    tool_choice: ToolChoice = "auto"
    parallel_tool_calls: bool = True
    text: TextConfig = TextConfig()
    reasoning: ReasoningConfig = ReasoningConfig()
    include: Annotated[list[str], MaxEntries(MAX_INCLUDE_ENTRIES)] = Field(default_factory=list)
    metadata: Metadata = Field(default_factory=dict)
    truncation: Literal["auto", "disabled"] = "disabled"
    stream: bool = False
    stream_options: dict[str, Any] | None = None
    """Has no effect, because there is no obfuscation."""
    store: bool | None = None
    background: bool = False
    previous_response_id: str | None = None
    conversation: str | ConversationId | None = None
    generate: bool = True
    """If false, only compute the prompt into the prefix cache. The response can be continued."""
    safety_identifier: Annotated[str, StringConstraints(max_length=MAX_IDENTIFIER_LENGTH)] | None = None
    """The answer repeats it."""
    prompt_cache_key: Annotated[str, StringConstraints(max_length=MAX_IDENTIFIER_LENGTH)] | None = None
    prompt_cache_options: PromptCacheOptions = PromptCacheOptions()
    prompt: Any = None

    @property
    def conversation_id(self) -> str | None:
        return self.conversation.id if isinstance(self.conversation, ConversationId) else self.conversation

    @property
    def tools_with_namespace(self) -> Iterator[tuple[str, FunctionTool | CustomTool]]:
        """Yields (namespace or "", tool), without search tools."""
        for tool in self.tools:
            if isinstance(tool, NamespaceTool):
                yield from ((tool.name, inner) for inner in tool.tools)
            elif not isinstance(tool, SearchTool):
                yield "", tool

    def check_params_and_list_ignored(self) -> list[str]:
        if self.prompt is not None:
            raise InvalidRequest("prompt is not supported: give instructions and input", param="prompt")
        return [*super().check_params_and_list_ignored(), *self._params_without_effect()]

    def _params_without_effect(self) -> list[str]:
        is_ignored = {
            "truncation": self.truncation == "auto",
            "text.verbosity": self.text.verbosity not in (None, "medium"),
            "reasoning.summary": self.reasoning.summary is not None,
            "safety_identifier": self.safety_identifier is not None,
            "prompt_cache_options.mode": self.prompt_cache_options.mode == "explicit",
            "prompt_cache_options.ttl": self.prompt_cache_options.ttl is not None,
            "prompt_cache_options.prewarm": self.prompt_cache_options.prewarm,
            "include": any(one not in (INCLUDE_LOGPROBS, INCLUDE_ENCRYPTED_REASONING) for one in self.include),
        }
        for index, tool in enumerate(self.tools):
            is_ignored[f"tools.{index}"] = isinstance(tool, SearchTool)
        return [name for name, applies in is_ignored.items() if applies]
