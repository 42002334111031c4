"""Tools of a chat request, and the calls in its earlier turns."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from quire.server.protocol.bounds import MAX_CALLS, MAX_TOOLS, AtMost, Open

Name = Annotated[str, StringConstraints(pattern=r"^[a-zA-Z0-9_.:/-]{1,128}$")]
"""OpenAI allows [a-zA-Z0-9_-]{1,64}; other clients use name spaces too."""


class FunctionSpec(Open):
    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """JSON schema of the arguments, an object; None: the function takes no arguments."""
    strict: bool | None = None


class ToolSpec(Open):
    type: Literal["function"] = "function"
    function: FunctionSpec

    def as_dict(self) -> dict[str, Any]:
        """The tool as templates show it to the model."""
        return self.model_dump(exclude_none=True)


Tools = Annotated[list[ToolSpec], AtMost(MAX_TOOLS)]


class FunctionName(BaseModel):
    model_config = ConfigDict(frozen=True)

    name: str


class NamedTool(BaseModel):
    model_config = ConfigDict(frozen=True)

    type: Literal["function"] = "function"
    function: FunctionName


class AllowedNames(BaseModel):
    model_config = ConfigDict(frozen=True)

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], AtMost(MAX_TOOLS), Field(min_length=1)]


class AllowedTools(BaseModel):
    """Of the tools that are listed, these may be called; the model is shown no others."""

    model_config = ConfigDict(frozen=True)

    type: Literal["allowed_tools"]
    allowed_tools: AllowedNames


ToolChoice = Literal["none", "auto", "required"] | AllowedTools | NamedTool


class CalledFunction(Open):
    name: str
    arguments: str | dict[str, Any] = Field(default="{}")
    """JSON in a string, as OpenAI has it, or the object itself, as some clients send it."""


class ToolCall(Open):
    """A call in an assistant's earlier turn."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction


ToolCalls = Annotated[list[ToolCall], AtMost(MAX_CALLS)]
