from __future__ import annotations

import json
from typing import Any

from quire.engine.common.errors import InvalidRequest
from quire.server.formats.lark_to_regex import lark_to_regex
from quire.server.formats.tools.tool_parser import Tool, ToolFormat
from quire.server.protocol.tools import CUSTOM_INPUT_ARGUMENT, CustomSpec, FunctionSpec, InputGrammar

PROBE_PATTERN = "qpatternq"


def can_enforce_patterns(format: ToolFormat) -> bool:
    """True if the format writes strings as JSON or verbatim."""
    tool = Tool("f", input_schema(PROBE_PATTERN))
    try:
        return PROBE_PATTERN in format.build_calls_grammar([tool], False, json.dumps, must=True)
    except InvalidRequest:
        return False


def custom_tool_function(tool: CustomSpec, field_path: str, *, can_enforce: bool) -> FunctionSpec:
    description, grammar = tool.description or "", tool.input_grammar
    if grammar is None:
        return FunctionSpec(name=tool.name, description=description, parameters=input_schema(None))
    description += f"\nThe input must match this grammar ({grammar.syntax}):\n{grammar.definition}"
    if not can_enforce:
        wrong = "this model's tool calls escape strings in a way that a grammar cannot enforce"
        raise InvalidRequest(f"{field_path}: the grammar of {tool.name}: {wrong}", param="tools")
    try:
        pattern = input_pattern(grammar)
    except InvalidRequest as error:
        raise InvalidRequest(f"{field_path}: the grammar of {tool.name}: {error.message}", param="tools") from error
    return FunctionSpec(name=tool.name, description=description.strip(), parameters=input_schema(pattern), strict=True)


def input_pattern(grammar: InputGrammar) -> str:
    """Raises InvalidRequest if the grammar is not regular."""
    regex = lark_to_regex(grammar.definition) if grammar.syntax == "lark" else grammar.definition
    return f"^(?:{regex})$"


def input_schema(pattern: str | None) -> dict[str, Any]:
    text = {"type": "string"} if pattern is None else {"type": "string", "pattern": pattern}
    return {
        "type": "object",
        "properties": {CUSTOM_INPUT_ARGUMENT: text},
        "required": [CUSTOM_INPUT_ARGUMENT],
        "additionalProperties": False,
    }
