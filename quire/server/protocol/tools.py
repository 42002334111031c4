"""A chat's tools, and calls in earlier turns."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, StringConstraints, Tag

from quire.server.protocol.field_limits import MAX_TOOL_CALLS, MAX_TOOLS, ExtraFieldsModel, MaxEntries

ToolNameText = Annotated[str, StringConstraints(pattern=r"^[a-zA-Z0-9_.:/-]{1,128}$")]
"""OpenAI allows [a-zA-Z0-9_-]{1,64}; other clients use namespaces."""
CUSTOM_INPUT_ARGUMENT = "input"
"""The model sees a custom tool as a function with this argument."""


def _tool_type_tag(value: Any) -> str:
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return "[custom]" if kind == "custom" else "[function]"


class FunctionSpec(ExtraFieldsModel):
    name: ToolNameText
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """JSON schema. None means no arguments."""
    strict: bool | None = None


class ToolSpec(ExtraFieldsModel):
    type: Literal["function"] = "function"
    function: FunctionSpec

    @property
    def name(self) -> str:
        return self.function.name

    def to_template_tool(self) -> dict[str, Any]:
        return self.model_dump(exclude_none=True)


class TextFormat(ExtraFieldsModel):
    type: Literal["text"]


class InputGrammar(ExtraFieldsModel):
    syntax: Literal["lark", "regex"]
    definition: str


class GrammarFormat(ExtraFieldsModel):
    type: Literal["grammar"]
    grammar: InputGrammar


class CustomSpec(ExtraFieldsModel):
    """Takes free text."""

    name: ToolNameText
    description: str | None = None
    format: Annotated[TextFormat | GrammarFormat, Field(discriminator="type")] | None = None

    @property
    def input_grammar(self) -> InputGrammar | None:
        return self.format.grammar if isinstance(self.format, GrammarFormat) else None


class CustomToolSpec(ExtraFieldsModel):
    type: Literal["custom"]
    custom: CustomSpec

    @property
    def name(self) -> str:
        return self.custom.name


FunctionToolList = Annotated[list[ToolSpec], MaxEntries(MAX_TOOLS)]
FunctionOrCustomTool = Annotated[
    Annotated[ToolSpec, Tag("[function]")] | Annotated[CustomToolSpec, Tag("[custom]")],
    Discriminator(_tool_type_tag),
]
ToolList = Annotated[list[FunctionOrCustomTool], MaxEntries(MAX_TOOLS)]


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


FunctionOrCustomName = Annotated[
    Annotated[NamedFunction, Tag("[function]")] | Annotated[NamedCustomTool, Tag("[custom]")],
    Discriminator(_tool_type_tag),
]


class AllowedNames(BaseModel):
    model_config = ConfigDict(frozen=True)

    mode: Literal["auto", "required"]
    tools: Annotated[list[FunctionOrCustomName], MaxEntries(MAX_TOOLS), Field(min_length=1)]


class AllowedTools(BaseModel):
    """Only these may be called; the model sees no others."""

    model_config = ConfigDict(frozen=True)

    type: Literal["allowed_tools"]
    allowed_tools: AllowedNames


def _tool_choice_tag(value: Any) -> str:
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    if kind == "allowed_tools":
        return "[allowed]"
    return _tool_type_tag(value) if isinstance(value, dict | BaseModel) else "[word]"


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("[word]")]
    | Annotated[AllowedTools, Tag("[allowed]")]
    | Annotated[NamedFunction, Tag("[function]")]
    | Annotated[NamedCustomTool, Tag("[custom]")],
    Discriminator(_tool_choice_tag),
]


class CalledFunction(ExtraFieldsModel):
    name: str
    arguments: str | dict[str, Any] = Field(default="{}")
    """JSON text, as in OpenAI's API; some clients send an object."""


class ToolCall(ExtraFieldsModel):
    """A call in an earlier turn."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction


class CustomInput(ExtraFieldsModel):
    name: str
    input: str


class CustomToolCall(ExtraFieldsModel):
    """A call in an earlier turn."""

    id: str | None = None
    type: Literal["custom"]
    custom: CustomInput

    def to_function_call(self) -> dict[str, Any]:
        """Returns what the model wrote: a function call with the input as its argument."""
        arguments = json.dumps({CUSTOM_INPUT_ARGUMENT: self.custom.input}, ensure_ascii=False)
        called = {"type": "function", "function": {"name": self.custom.name, "arguments": arguments}}
        return called if self.id is None else {"id": self.id, **called}


FunctionOrCustomCall = Annotated[
    Annotated[ToolCall, Tag("[function]")] | Annotated[CustomToolCall, Tag("[custom]")],
    Discriminator(_tool_type_tag),
]
ToolCallList = Annotated[list[FunctionOrCustomCall], MaxEntries(MAX_TOOL_CALLS)]
