"""The tools of a chat request: which of them the model is shown, whether calls are looked for, what it must call."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from quire.engine.errors import InvalidRequest
from quire.engine.text.tokenizer import Tokenizer
from quire.engine.types import Grammar
from quire.server.formats.grammars import literal
from quire.server.formats.tools.format import ANY_OBJECT, Tool, ToolFormat
from quire.server.protocol.chat import ChatRequest
from quire.server.protocol.tools import NamedTool

PLACE = "tools[{}].function.parameters"


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The use that one request makes of tools."""

    shown: list[dict[str, Any]] | None = None
    """The tools that the template shows the model; None: it shows none."""
    format: ToolFormat | None = None
    """None: calls are not looked for."""
    known: Mapping[str, Tool] = field(default_factory=dict)
    must_call: Sequence[Tool] = ()
    """The answer is a call of one of these; empty: the model decides."""
    strict: bool = False
    """Arguments follow their schema in calls that the model decides on, too."""
    parallel: bool = True

    @property
    def schemas(self) -> list[tuple[str, Grammar]]:
        """The schemas of the tools, each with the field that it comes from, in case that their grammar is wrong."""
        schemas = enumerate(tool.parameters for tool in self.known.values())
        return [(PLACE.format(index), Grammar("json", json.dumps(schema))) for index, schema in schemas]

    def grammar(self, tokenizer: Tokenizer, *, alone: bool = False) -> Grammar | None:
        """The grammar of an answer that must call a tool, or whose calls are strict; None: it is free.

        `alone`: the grammar is one of calls without text beside them, strict or not. Raises InvalidRequest for a tool
        that no grammar can be made of.
        """
        if self.format is None or not (self.must_call or self.strict or alone):
            return None
        tools, must = self.must_call or list(self.known.values()), alone or bool(self.must_call)
        try:
            text = self.format.grammar(tools, self.parallel, partial(literal, tokenizer=tokenizer), must=must)
            return Grammar("lark", text)
        except InvalidRequest as error:
            raise InvalidRequest(error.message, param="tools") from error


def tool_use(body: ChatRequest, format: ToolFormat | None) -> ToolUse:
    """Raises InvalidRequest naming the parameter."""
    known: dict[str, Tool] = {}
    for index, spec in enumerate(body.tools):
        function = spec.function
        if function.name in known:
            raise InvalidRequest(f"tools[{index}]: there are two functions named {function.name}", param="tools")
        known[function.name] = Tool(function.name, _parameters(function.parameters, index))
    choice = body.tool_choice
    if isinstance(choice, NamedTool) and choice.function.name not in known:
        raise InvalidRequest(f"tool_choice: there is no tool named {choice.function.name}", param="tool_choice")
    if choice == "required" and not known:
        raise InvalidRequest("tool_choice required needs tools to choose from", param="tool_choice")
    if choice == "none" or not known:
        return ToolUse()
    if format is None:
        raise InvalidRequest(
            "tool calls are switched off here by --tool-call-parser none; the operator can set --tool-call-parser auto",
            param="tools",
        )
    must_call: Sequence[Tool] = ()
    if isinstance(choice, NamedTool):
        must_call = [known[choice.function.name]]
    elif choice == "required":
        must_call = list(known.values())
    parallel = body.parallel_tool_calls and not isinstance(choice, NamedTool)
    strict = any(spec.function.strict for spec in body.tools)
    return ToolUse([spec.as_dict() for spec in body.tools], format, known, must_call, strict, parallel)


def _parameters(schema: dict[str, Any] | None, index: int) -> Mapping[str, Any]:
    """The schema of the arguments. Parsers and grammars rely on what is checked here: the form of its first level."""
    if not schema:
        return ANY_OBJECT if schema is None else {**ANY_OBJECT, **schema}
    place = PLACE.format(index)
    if schema.get("type", "object") != "object":
        raise InvalidRequest(f"{place}: arguments are an object, so its type must be object", param="tools")
    properties, required = schema.get("properties", {}), schema.get("required", [])
    if not isinstance(properties, dict) or not all(isinstance(one, dict | bool) for one in properties.values()):
        raise InvalidRequest(f"{place}.properties must map names to JSON schemas", param="tools")
    if not isinstance(required, list) or not all(isinstance(one, str) for one in required):
        raise InvalidRequest(f"{place}.required must be a list of names", param="tools")
    return {**ANY_OBJECT, **schema}
