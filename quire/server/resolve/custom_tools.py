"""Custom tools as functions that the model is shown: the input is the only argument."""

from __future__ import annotations

import json
from typing import Any

from quire.engine.errors import InvalidRequest
from quire.server.formats.regular import as_regex
from quire.server.formats.tools.format import Tool, ToolFormat
from quire.server.protocol.tools import CUSTOM_INPUT, CustomSpec, FunctionSpec, InputGrammar

PROBE = "qpatternq"


def holds_patterns(format: ToolFormat) -> bool:
    """Whether a grammar of calls in this format can enforce the `pattern` of a schema: it can where texts are written
    as JSON or verbatim."""
    tool = Tool("f", parameters(PROBE))
    try:
        return PROBE in format.grammar([tool], False, json.dumps, must=True)
    except InvalidRequest:
        return False


def function_of(tool: CustomSpec, place: str, *, held: bool) -> FunctionSpec:
    """`place`: the field that has the grammar. `held`: texts are held to patterns. Raises InvalidRequest."""
    description, grammar = tool.description or "", tool.grammar
    if grammar is None:
        return FunctionSpec(name=tool.name, description=description, parameters=parameters(None))
    description += f"\nThe input must match this grammar ({grammar.syntax}):\n{grammar.definition}"
    if not held:
        wrong = "calls of this model have escapes of their own in strings, which no grammar can be held to"
        raise InvalidRequest(f"{place}: the grammar of {tool.name}: {wrong}", param="tools")
    try:
        pattern = pattern_of(grammar)
    except InvalidRequest as error:
        raise InvalidRequest(f"{place}: the grammar of {tool.name}: {error.message}", param="tools") from error
    return FunctionSpec(name=tool.name, description=description.strip(), parameters=parameters(pattern), strict=True)


def pattern_of(grammar: InputGrammar) -> str:
    """A regular expression of all of the input. Raises InvalidRequest for a grammar that is not regular."""
    found = as_regex(grammar.definition) if grammar.syntax == "lark" else grammar.definition
    return f"^(?:{found})$"


def parameters(pattern: str | None) -> dict[str, Any]:
    """The schema of the function's arguments."""
    text = {"type": "string"} if pattern is None else {"type": "string", "pattern": pattern}
    return {
        "type": "object",
        "properties": {CUSTOM_INPUT: text},
        "required": [CUSTOM_INPUT],
        "additionalProperties": False,
    }
