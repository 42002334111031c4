"""The tools of the Responses API as a chat's functions. A custom one's input is the only argument of its function."""

from __future__ import annotations

import json
from typing import Any

from quire.engine.errors import InvalidRequest
from quire.server.formats.regular import as_regex
from quire.server.formats.tools.format import Tool, ToolFormat
from quire.server.protocol.items import CUSTOM_INPUT
from quire.server.protocol.responses import CustomTool, FunctionTool, GrammarFormat

PROBE = "qpatternq"


def holds_patterns(format: ToolFormat | None) -> bool:
    """Whether a grammar of calls in this format can enforce the `pattern` of a schema: it can where texts are written
    as JSON or verbatim."""
    if format is None:
        return False
    tool = Tool("f", parameters(PROBE))
    try:
        return PROBE in format.grammar([tool], False, json.dumps, must=True)
    except InvalidRequest:
        return False


def function_of(name: str, tool: FunctionTool | CustomTool, *, held: bool) -> dict[str, Any]:
    """A tool as a chat's function of this name. `held`: texts are held to patterns. Raises InvalidRequest."""
    if isinstance(tool, FunctionTool):
        return {**tool.model_dump(exclude={"type"}, exclude_none=True), "name": name}
    told, grammar = tool.description or "", tool.grammar
    if grammar is None:
        return {"name": name, "description": told, "parameters": parameters(None)}
    told += f"\nThe input must match this grammar ({grammar.syntax}):\n{grammar.definition}"
    if not held:
        wrong = "calls of this model have escapes of their own in strings, which no grammar can be held to"
        raise InvalidRequest(f"tools: the format of {name}: {wrong}", param="tools")
    try:
        pattern = pattern_of(grammar)
    except InvalidRequest as error:
        raise InvalidRequest(f"tools: the format of {name}: {error.message}", param="tools") from error
    return {"name": name, "description": told.strip(), "parameters": parameters(pattern), "strict": True}


def pattern_of(grammar: GrammarFormat) -> str:
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
