"""Tools of a chat request, and the calls in its earlier turns."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, StringConstraints, Tag

from quire.server.protocol.bounds import MAX_CALLS, MAX_TOOLS, AtMost, Open

Name = Annotated[str, StringConstraints(pattern=r"^[a-zA-Z0-9_.:/-]{1,128}$")]
"""OpenAI allows [a-zA-Z0-9_-]{1,64}; other clients use name spaces too."""
CUSTOM_INPUT = "input"
"""The one argument of a custom tool, as the model is shown it."""


def _function_or_custom(value: Any) -> str:
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return "[custom]" if kind == "custom" else "[function]"


class FunctionSpec(Open):
    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """JSON schema of the arguments, an object; None: the function takes no arguments."""
    strict: bool | None = None


class ToolSpec(Open):
    type: Literal["function"] = "function"
    function: FunctionSpec

    @property
    def name(self) -> str:
        return self.function.name

    def as_dict(self) -> dict[str, Any]:
        """The tool as templates show it to the model."""
        return self.model_dump(exclude_none=True)


class TextFormat(Open):
    type: Literal["text"]


class InputGrammar(Open):
    syntax: Literal["lark", "regex"]
    definition: str


class GrammarFormat(Open):
    type: Literal["grammar"]
    grammar: InputGrammar


class CustomSpec(Open):
    """A tool whose input is a text."""

    name: Name
    description: str | None = None
    format: Annotated[TextFormat | GrammarFormat, Field(discriminator="type")] | None = None

    @property
    def grammar(self) -> InputGrammar | None:
        return self.format.grammar if isinstance(self.format, GrammarFormat) else None


class CustomToolSpec(Open):
    type: Literal["custom"]
    custom: CustomSpec

    @property
    def name(self) -> str:
        return self.custom.name


FunctionTools = Annotated[list[ToolSpec], AtMost(MAX_TOOLS)]
AnyTool = Annotated[
    Annotated[ToolSpec, Tag("[function]")] | Annotated[CustomToolSpec, Tag("[custom]")],
    Discriminator(_function_or_custom),
]
Tools = Annotated[list[AnyTool], AtMost(MAX_TOOLS)]


class ToolName(BaseModel):
    model_config = ConfigDict(frozen=True)

    name: str


class NamedFunction(BaseModel):
    model_config = ConfigDict(frozen=True)

    type: Literal["function"] = "function"
    function: ToolName

    @property
    def name(self) -> str:
        return self.function.name


class NamedCustomTool(BaseModel):
    model_config = ConfigDict(frozen=True)

    type: Literal["custom"]
    custom: ToolName

    @property
    def name(self) -> str:
        return self.custom.name


NamedTool = Annotated[
    Annotated[NamedFunction, Tag("[function]")] | Annotated[NamedCustomTool, Tag("[custom]")],
    Discriminator(_function_or_custom),
]


class AllowedNames(BaseModel):
    model_config = ConfigDict(frozen=True)

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], AtMost(MAX_TOOLS), Field(min_length=1)]


class AllowedTools(BaseModel):
    """Of the tools that are listed, these may be called; the model is shown no others."""

    model_config = ConfigDict(frozen=True)

    type: Literal["allowed_tools"]
    allowed_tools: AllowedNames


def _choice_kind(value: Any) -> str:
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    if kind == "allowed_tools":
        return "[allowed]"
    return _function_or_custom(value) if isinstance(value, dict | BaseModel) else "[word]"


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("[word]")]
    | Annotated[AllowedTools, Tag("[allowed]")]
    | Annotated[NamedFunction, Tag("[function]")]
    | Annotated[NamedCustomTool, Tag("[custom]")],
    Discriminator(_choice_kind),
]


class CalledFunction(Open):
    name: str
    arguments: str | dict[str, Any] = Field(default="{}")
    """JSON in a string, as OpenAI has it, or the object itself, as some clients send it."""


class ToolCall(Open):
    """A call in an assistant's earlier turn."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction


class CustomInput(Open):
    name: str
    input: str


class CustomToolCall(Open):
    """A custom tool's call in an assistant's earlier turn."""

    id: str | None = None
    type: Literal["custom"]
    custom: CustomInput

    def as_function(self) -> dict[str, Any]:
        """The call as the model wrote it: of a function, whose only argument is the input."""
        arguments = json.dumps({CUSTOM_INPUT: self.custom.input}, ensure_ascii=False)
        called = {"type": "function", "function": {"name": self.custom.name, "arguments": arguments}}
        return called if self.id is None else {"id": self.id, **called}


AnyToolCall = Annotated[
    Annotated[ToolCall, Tag("[function]")] | Annotated[CustomToolCall, Tag("[custom]")],
    Discriminator(_function_or_custom),
]
ToolCalls = Annotated[list[AnyToolCall], AtMost(MAX_CALLS)]
