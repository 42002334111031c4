"""The tools of a chat request: which of them the model is shown, whether calls are looked for, what it must call."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from quire.engine.errors import InvalidRequest
from quire.engine.schemas.closing import Closed, closed
from quire.engine.schemas.enforceable import weaker, with_sound_arguments
from quire.engine.text.structured import enforced_schema
from quire.engine.text.tokenizer import Tokenizer
from quire.engine.types import Grammar
from quire.server.formats.grammars import literal
from quire.server.formats.tools.format import ANY_OBJECT, Tool, ToolFormat
from quire.server.protocol.chat import ChatRequest
from quire.server.protocol.tools import AllowedTools, AnyTool, CustomToolSpec, NamedCustomTool, NamedFunction, ToolSpec
from quire.server.resolve.custom_tools import function_of, holds_patterns

PLACE = "tools[{}].function.parameters"
CUSTOM_PLACE = "tools[{}].custom.format"


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The use that one request makes of tools."""

    shown: list[dict[str, Any]] | None = None
    """The tools that the template shows the model; None: it shows none."""
    format: ToolFormat | None = None
    """None: calls are not looked for."""
    known: Mapping[str, Tool] = field(default_factory=dict)
    custom: frozenset[str] = frozenset()
    """Names of custom tools: their input is the only argument of a function."""
    must_call: Sequence[Tool] = ()
    """The answer is a call of one of these; empty: the model decides."""
    strict: frozenset[str] = frozenset()
    """Names of tools whose calls follow their schema exactly, also where the model decides whether it calls."""
    parallel: bool = True
    close: bool = True
    """Objects of schemas that name properties, and say nothing of others, have no others."""
    places: Mapping[str, str] = field(default_factory=dict)
    """The fields that the tools' schemas come from."""
    levels: Mapping[str, int] = field(default_factory=dict)
    """How much weaker the schemas of some tools are, of those that nobody asked to hold: see `weaker`."""

    @property
    def loose(self) -> list[str]:
        """Names of tools that a grammar may have, and whose calls nobody asked to hold to their schema."""
        return [tool.name for tool in self._held if tool.name not in self.strict]

    @property
    def schemas(self) -> list[tuple[str, Grammar]]:
        """The schemas of the tools that a grammar may have, each with the field that it comes from."""
        return [(self._place(tool.name), self.schema(tool.name)) for tool in self._held]

    def schema(self, name: str) -> Grammar:
        """The schema that a grammar holds calls of a tool to."""
        return Grammar("json", json.dumps(self._enforced(self.known[name]).schema))

    @property
    def open(self) -> dict[str, tuple[str, ...]]:
        """Objects that stay open, by the field of the schema that they are in."""
        return {self._place(tool.name): places for tool in self._held if (places := self._enforced(tool).open)}

    @property
    def weakened(self) -> list[str]:
        """The fields of schemas that answers are not held to exactly, although they asked for calls of these tools."""
        return [self._place(name) for name in self.known if self.levels.get(name)]

    def weaker(self, levels: Mapping[str, int]) -> ToolUse:
        """The same with weaker schemas of some tools, by their names: quire.engine.schemas.enforceable has the
        levels."""
        return replace(self, levels={**self.levels, **levels})

    def grammar(self, tokenizer: Tokenizer, *, alone: bool = False) -> Grammar | None:
        """The grammar of an answer that must call a tool, or of which some calls are strict; None: it is free.

        `alone`: the grammar is one of calls without text beside them, strict or not. Raises InvalidRequest for a strict
        tool that no grammar can be made of.
        """
        if self.format is None or not (self.must_call or self.strict or alone):
            return None
        must = alone or bool(self.must_call)
        tools = [Tool(tool.name, self._enforced(tool).schema) for tool in self._held]
        try:
            text = self.format.grammar(tools, self.parallel, partial(literal, tokenizer=tokenizer), must=must)
            return Grammar("lark", text)
        except InvalidRequest as error:
            raise InvalidRequest(error.message, param="tools") from error

    @property
    def _held(self) -> Sequence[Tool]:
        return self.must_call or list(self.known.values())

    def _place(self, name: str) -> str:
        return self.places[name]

    def _enforced(self, tool: Tool) -> Closed:
        """The schema that a grammar holds calls of the tool to. Raises InvalidRequest."""
        if tool.name not in self.strict:
            found = closed(tool.parameters, by_name=True) if self.close else Closed(tool.parameters, ())
            return Closed(weaker(found.schema, self.levels.get(tool.name, 0)), found.open)
        try:
            return enforced_schema(tool.parameters, close=self.close, by_name=True)
        except InvalidRequest as error:
            raise InvalidRequest(f"{self._place(tool.name)}: {error.message}", param="tools") from error


def tool_use(body: ChatRequest, format: ToolFormat | None, *, close: bool = True) -> ToolUse:
    """`close`: see ToolUse. Raises InvalidRequest naming the parameter."""
    specs = as_functions(body.tools, None if body.tool_choice == "none" else format)
    known: dict[str, Tool] = {}
    for index, spec in enumerate(specs):
        function = spec.function
        if function.name in known:
            raise InvalidRequest(f"tools[{index}]: there are two functions named {function.name}", param="tools")
        parameters = function.parameters if function.strict else with_sound_arguments(function.parameters)
        known[function.name] = Tool(function.name, _parameters(parameters, index))
    choice = body.tool_choice
    if isinstance(choice, AllowedTools):
        allowed = [tool.name for tool in choice.allowed_tools.tools]
        if missing := next((name for name in allowed if name not in known), None):
            raise InvalidRequest(f"tool_choice: there is no tool named {missing}", param="tool_choice")
        specs = [spec for spec in specs if spec.name in allowed]
        known = {name: tool for name, tool in known.items() if name in allowed}
        choice = choice.allowed_tools.mode
    named = choice.name if isinstance(choice, NamedFunction | NamedCustomTool) else None
    if named is not None and named not in known:
        raise InvalidRequest(f"tool_choice: there is no tool named {named}", param="tool_choice")
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
    if named is not None:
        must_call = [known[named]]
    elif choice == "required":
        must_call = list(known.values())
    return ToolUse(
        shown=[spec.as_dict() for spec in specs],
        format=format,
        known=known,
        custom=frozenset(spec.name for spec in body.tools if isinstance(spec, CustomToolSpec)),
        must_call=must_call,
        strict=frozenset(spec.name for spec in specs if spec.function.strict),
        parallel=body.parallel_tool_calls and named is None,
        close=close,
        places={spec.name: _place_of(spec, index) for index, spec in enumerate(body.tools)},
    )


def as_functions(tools: Sequence[AnyTool], format: ToolFormat | None) -> list[ToolSpec]:
    """The tools as the model is shown them. Raises InvalidRequest for a custom tool's grammar that calls in this format
    cannot be held to; None: they are not held."""
    found = []
    for index, spec in enumerate(tools):
        if isinstance(spec, CustomToolSpec):
            held = spec.custom.grammar is None or format is None or holds_patterns(format)
            spec = ToolSpec(function=function_of(spec.custom, CUSTOM_PLACE.format(index), held=held))
        found.append(spec)
    return found


def _place_of(spec: AnyTool, index: int) -> str:
    return (CUSTOM_PLACE if isinstance(spec, CustomToolSpec) else PLACE).format(index)


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
