"""POST /v1/responses: OpenAI's Responses API."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, StringConstraints, Tag

from quire.engine.errors import InvalidRequest
from quire.server.protocol.bounds import MAX_TOOLS, AtMost, TokenLimit
from quire.server.protocol.common import Given
from quire.server.protocol.items import InputWithReferences
from quire.server.protocol.tools import Name
from quire.server.protocol.translated import EXTENSIONS, TranslatedBody

MAX_INCLUDED = 32
MAX_METADATA = 16
MAX_IDENTIFIER = 64
"""Characters of safety_identifier and of prompt_cache_key, as at OpenAI."""
MAX_REPEATED = 1 << 20
"""Bytes of a request that its answer repeats: instructions, tools, text.format and smaller ones. Every answer under way
holds them. Agents with a hundred tools have 100 KB."""
LOGPROBS = "message.output_text.logprobs"
ENCRYPTED = "reasoning.encrypted_content"


class FunctionTool(Given):
    type: Literal["function"]
    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class FreeText(Given):
    type: Literal["text"]


class GrammarFormat(Given):
    type: Literal["grammar"]
    syntax: Literal["lark", "regex"]
    definition: str


class CustomTool(Given):
    """A tool whose input is a text."""

    type: Literal["custom"]
    name: Name
    description: str | None = None
    format: Annotated[FreeText | GrammarFormat, Field(discriminator="type")] | None = None

    @property
    def grammar(self) -> GrammarFormat | None:
        return self.format if isinstance(self.format, GrammarFormat) else None


class SearchTool(Given):
    """A tool of OpenAI's servers or models that agents offer unasked: the model is not shown it."""

    type: Literal["web_search", "web_search_preview", "tool_search"]


class NamespaceTool(Given):
    """Tools with a name in common: the model is shown them as NAMESPACE.NAME."""

    type: Literal["namespace"]
    name: Name
    description: str | None = None
    tools: Annotated[list[Annotated[FunctionTool | CustomTool, Field(discriminator="type")]], AtMost(MAX_TOOLS)]


Tool = Annotated[FunctionTool | CustomTool | NamespaceTool | SearchTool, Field(discriminator="type")]


class ChosenTool(Given):
    type: Literal["function", "custom"]
    name: str


class AllowedTools(Given):
    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[ChosenTool], AtMost(MAX_TOOLS), Field(min_length=1)]


def _choice(given: Any) -> Any:
    return "str" if isinstance(given, str) else given.get("type") if isinstance(given, dict) else "{}"


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("str")]
    | Annotated[ChosenTool, Tag("function")]
    | Annotated[ChosenTool, Tag("custom")]
    | Annotated[AllowedTools, Tag("allowed_tools")],
    Discriminator(_choice),
]


class TextFormat(Given):
    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str = "answer"
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class TextConfig(Given):
    format: TextFormat = TextFormat()
    verbosity: Literal["low", "medium", "high"] | None = None


class ReasoningConfig(Given):
    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None


MetadataKey = Annotated[str, StringConstraints(max_length=64)]
MetadataValue = Annotated[str, StringConstraints(max_length=512)]
Metadata = Annotated[dict[MetadataKey, MetadataValue], AtMost(MAX_METADATA)]


class ConversationId(Given):
    id: str


class ResponsesRequest(TranslatedBody):
    called: ClassVar[Mapping[str, str]] = {
        "messages": "input",
        "max_tokens": "max_output_tokens",
        "max_completion_tokens": "max_output_tokens",
        "response_format": "text.format",
        "reasoning_effort": "reasoning.effort",
    }
    taken: ClassVar[tuple[str, ...]] = (*EXTENSIONS, "top_k", "stop", "include_reasoning")

    input: InputWithReferences = ""
    instructions: str | None = None
    max_output_tokens: TokenLimit | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: int = Field(0, ge=0)
    tools: Annotated[list[Tool], AtMost(MAX_TOOLS)] = Field(default_factory=list)
    tool_choice: ToolChoice = "auto"
    parallel_tool_calls: bool = True
    text: TextConfig = TextConfig()
    reasoning: ReasoningConfig = ReasoningConfig()
    include: Annotated[list[str], AtMost(MAX_INCLUDED)] = Field(default_factory=list)
    metadata: Metadata = Field(default_factory=dict)
    truncation: Literal["auto", "disabled"] = "disabled"
    stream: bool = False
    stream_options: dict[str, Any] | None = None
    """Without effect: what it would switch off, obfuscation, is not there."""
    store: bool | None = None
    """Default: true where the server stores responses."""
    background: bool = False
    previous_response_id: str | None = None
    conversation: str | ConversationId | None = None
    safety_identifier: Annotated[str, StringConstraints(max_length=MAX_IDENTIFIER)] | None = None
    """Without effect, but for the answer, which repeats it."""
    prompt_cache_key: Annotated[str, StringConstraints(max_length=MAX_IDENTIFIER)] | None = None
    prompt: Any = None
    """Prompts that OpenAI keeps are not here."""

    @property
    def conversation_id(self) -> str | None:
        return self.conversation.id if isinstance(self.conversation, ConversationId) else self.conversation

    @property
    def own_tools(self) -> Iterator[tuple[str, FunctionTool | CustomTool]]:
        """The caller's tools, each with its namespace, which is empty for most."""
        for tool in self.tools:
            if isinstance(tool, NamespaceTool):
                yield from ((tool.name, inner) for inner in tool.tools)
            elif not isinstance(tool, SearchTool):
                yield "", tool

    def ignored_params(self) -> list[str]:
        if self.prompt is not None:
            raise InvalidRequest("prompt is not supported: give instructions and input", param="prompt")
        return [*super().ignored_params(), *self._without_effect()]

    def _without_effect(self) -> list[str]:
        found = {
            "truncation": self.truncation == "auto",
            "text.verbosity": self.text.verbosity not in (None, "medium"),
            "reasoning.summary": self.reasoning.summary is not None,
            "safety_identifier": self.safety_identifier is not None,
            "include": any(one not in (LOGPROBS, ENCRYPTED) for one in self.include),
        }
        for index, tool in enumerate(self.tools):
            found[f"tools.{index}"] = isinstance(tool, SearchTool)
        return [name for name, applies in found.items() if applies]
