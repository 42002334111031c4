from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from quire.engine.common.errors import InvalidRequest
from quire.engine.common.request_params import Grammar
from quire.engine.schemas.enforcement import repair_argument_schema, weaken_schema
from quire.engine.schemas.object_closing import ClosedSchema, close_objects
from quire.engine.text.structured_outputs import prepare_and_close_schema
from quire.engine.text.tokenizer import Tokenizer
from quire.server.config import ToolStrictLevel
from quire.server.formats.grammar_composition import lark_literal_with_special_tokens
from quire.server.formats.tools.tool_parser import ANY_OBJECT, Tool, ToolFormat
from quire.server.protocol.chat import ChatRequest
from quire.server.protocol.tools import (
    AllowedTools,
    CustomToolSpec,
    FunctionOrCustomTool,
    NamedCustomTool,
    NamedFunction,
    ToolChoice,
    ToolSpec,
)
from quire.server.resolve.custom_tools import can_enforce_patterns, custom_tool_function

PARAMETERS_FIELD = "tools[{}].function.parameters"
CUSTOM_FORMAT_FIELD = "tools[{}].custom.format"


@dataclass(frozen=True, slots=True)
class RequestTools:
    template_tools: list[dict[str, Any]] | None = None
    """None if the template shows no tools."""
    tool_format: ToolFormat | None = None
    """None if calls are not parsed."""
    tools_by_name: Mapping[str, Tool] = field(default_factory=dict)
    custom_tool_names: frozenset[str] = frozenset()
    required_tools: Sequence[Tool] = ()
    """The answer must call one of these. If empty, the model decides."""
    strict_tool_names: frozenset[str] = frozenset()
    """Tools whose calls follow the schema exactly, even if calling is optional."""
    constrains_all_calls: bool = False
    """True if all calls have the call format and name a tool."""
    allows_parallel: bool = True
    closes_objects: bool = True
    """True if schema objects with `properties` but no additionalProperties allow no other properties."""
    schema_fields: Mapping[str, str] = field(default_factory=dict)
    weakening_levels: Mapping[str, int] = field(default_factory=dict)

    @property
    def non_strict_tool_names(self) -> list[str]:
        return [tool.name for tool in self._constrained_tools if tool.name not in self.strict_tool_names]

    @property
    def schema_grammars(self) -> list[tuple[str, Grammar]]:
        return [(self._schema_field(tool.name), self.schema_grammar(tool.name)) for tool in self._constrained_tools]

    def schema_grammar(self, name: str) -> Grammar:
        return Grammar("json", json.dumps(self._enforced_schema(self.tools_by_name[name]).schema))

    @property
    def open_objects_by_field(self) -> dict[str, tuple[str, ...]]:
        return {
            self._schema_field(tool.name): places
            for tool in self._constrained_tools
            if (places := self._enforced_schema(tool).open_objects)
        }

    @property
    def weakened_schema_fields(self) -> list[str]:
        return [self._schema_field(name) for name in self.tools_by_name if self.weakening_levels.get(name)]

    def with_weaker_schemas(self, levels: Mapping[str, int]) -> RequestTools:
        return replace(self, weakening_levels={**self.weakening_levels, **levels})

    def build_tool_grammar(self, tokenizer: Tokenizer, *, calls_only: bool = False) -> Grammar | None:
        """Returns None if any answer is allowed. Raises InvalidRequest for a strict tool without a possible grammar."""
        constrains_arguments = self.required_tools or self.strict_tool_names or calls_only
        if self.tool_format is None or not (constrains_arguments or self.constrains_all_calls):
            return None
        must = calls_only or bool(self.required_tools)
        tools = [
            Tool(tool.name, self._enforced_schema(tool).schema if constrains_arguments else ANY_OBJECT)
            for tool in self._constrained_tools
        ]
        try:
            text = self.tool_format.build_calls_grammar(
                tools, self.allows_parallel, partial(lark_literal_with_special_tokens, tokenizer=tokenizer), must=must
            )
            return Grammar("lark", text)
        except InvalidRequest as error:
            raise InvalidRequest(error.message, param="tools") from error

    @property
    def _constrained_tools(self) -> Sequence[Tool]:
        return self.required_tools or list(self.tools_by_name.values())

    def _schema_field(self, name: str) -> str:
        return self.schema_fields[name]

    def _enforced_schema(self, tool: Tool) -> ClosedSchema:
        if tool.name not in self.strict_tool_names:
            closed_schema = (
                close_objects(tool.parameters, by_name=True)
                if self.closes_objects
                else ClosedSchema(tool.parameters, ())
            )
            return ClosedSchema(
                weaken_schema(closed_schema.schema, self.weakening_levels.get(tool.name, 0)), closed_schema.open_objects
            )
        try:
            return prepare_and_close_schema(tool.parameters, close=self.closes_objects, by_name=True)
        except InvalidRequest as error:
            raise InvalidRequest(f"{self._schema_field(tool.name)}: {error.message}", param="tools") from error


NO_TOOLS = RequestTools()


def resolve_request_tools(
    body: ChatRequest, format: ToolFormat | None, *, close: bool = True, strict_level: ToolStrictLevel = "auto"
) -> RequestTools:
    specs = convert_to_functions(body.tools, None if body.tool_choice == "none" else format)
    strict = frozenset(spec.name for spec in specs if spec.function.strict or strict_level == "parameter")
    tools_by_name = _make_tools(specs, strict)
    choice = body.tool_choice
    if isinstance(choice, AllowedTools):
        allowed = [tool.name for tool in choice.allowed_tools.tools]
        for name in allowed:
            _check_is_tool(name, tools_by_name)
        specs = [spec for spec in specs if spec.name in allowed]
        tools_by_name = {name: tool for name, tool in tools_by_name.items() if name in allowed}
        choice = choice.allowed_tools.mode
    required_tools = _choose_required_tools(choice, tools_by_name)
    if choice == "none" or not tools_by_name:
        return NO_TOOLS
    if format is None:
        raise InvalidRequest(
            "tool calls are disabled here (--tool-call-parser none); the operator can set --tool-call-parser auto",
            param="tools",
        )
    return RequestTools(
        template_tools=[spec.to_template_tool() for spec in specs],
        tool_format=format,
        tools_by_name=tools_by_name,
        custom_tool_names=frozenset(spec.name for spec in body.tools if isinstance(spec, CustomToolSpec)),
        required_tools=required_tools,
        strict_tool_names=strict & tools_by_name.keys(),
        constrains_all_calls=strict_level != "auto",
        allows_parallel=body.parallel_tool_calls and not isinstance(choice, NamedFunction | NamedCustomTool),
        closes_objects=close,
        schema_fields={spec.name: _tool_schema_field(spec, index) for index, spec in enumerate(body.tools)},
    )


def _make_tools(specs: Sequence[ToolSpec], strict: Collection[str]) -> dict[str, Tool]:
    """`strict`: names of tools whose schemas are not repaired."""
    tools: dict[str, Tool] = {}
    for index, spec in enumerate(specs):
        function = spec.function
        if function.name in tools:
            raise InvalidRequest(f"tools[{index}]: there are two functions named {function.name}", param="tools")
        parameters = function.parameters if spec.name in strict else repair_argument_schema(function.parameters)
        tools[function.name] = Tool(function.name, _check_and_complete_parameters(parameters, index))
    return tools


def _choose_required_tools(choice: ToolChoice, tools_by_name: Mapping[str, Tool]) -> list[Tool]:
    if isinstance(choice, NamedFunction | NamedCustomTool):
        _check_is_tool(choice.name, tools_by_name)
        return [tools_by_name[choice.name]]
    if choice != "required":
        return []
    if not tools_by_name:
        raise InvalidRequest("tool_choice required needs tools to choose from", param="tool_choice")
    return list(tools_by_name.values())


def _check_is_tool(name: str, tools_by_name: Mapping[str, Tool]) -> None:
    if name not in tools_by_name:
        raise InvalidRequest(f"tool_choice: there is no tool named {name}", param="tool_choice")


def convert_to_functions(tools: Sequence[FunctionOrCustomTool], format: ToolFormat | None) -> list[ToolSpec]:
    """If `format` is None, their grammars are not enforced. Raises InvalidRequest if calls cannot follow a custom
    tool's grammar.
    """
    function_specs = []
    for index, spec in enumerate(tools):
        if isinstance(spec, CustomToolSpec):
            can_enforce = spec.custom.input_grammar is None or format is None or can_enforce_patterns(format)
            spec = ToolSpec(
                function=custom_tool_function(spec.custom, CUSTOM_FORMAT_FIELD.format(index), can_enforce=can_enforce)
            )
        function_specs.append(spec)
    return function_specs


def _tool_schema_field(spec: FunctionOrCustomTool, index: int) -> str:
    return (CUSTOM_FORMAT_FIELD if isinstance(spec, CustomToolSpec) else PARAMETERS_FIELD).format(index)


def _check_and_complete_parameters(schema: dict[str, Any] | None, index: int) -> Mapping[str, Any]:
    """Checks the schema's first level, on which parsers and grammars rely."""
    if not schema:
        return ANY_OBJECT if schema is None else {**ANY_OBJECT, **schema}
    place = PARAMETERS_FIELD.format(index)
    if schema.get("type", "object") != "object":
        raise InvalidRequest(f"{place}: arguments are an object, so the schema's type must be object", param="tools")
    properties, required = schema.get("properties", {}), schema.get("required", [])
    if not isinstance(properties, dict) or not all(isinstance(one, dict | bool) for one in properties.values()):
        raise InvalidRequest(f"{place}.properties must map names to JSON schemas", param="tools")
    if not isinstance(required, list) or not all(isinstance(one, str) for one in required):
        raise InvalidRequest(f"{place}.required must be a list of names", param="tools")
    return {**ANY_OBJECT, **schema}
