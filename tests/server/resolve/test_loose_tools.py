"""The schema of a tool that is not strict never makes a request fail (llama.cpp#26930, fastmcp#4918)."""

from __future__ import annotations

import json
from itertools import islice
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from quire.engine.schemas.enforcement import WEAKEST_LEVEL, weaken_schema
from tests.server.resolve.test_tool_requests import HELLO, ONE, PATH, TOOLS, function, having, speaker, strict

HELD = strict(function("ok", a={"type": "boolean"}))
ODD: dict[str, Any] = {
    "uniqueItems": {"type": "array", "items": {"type": "string"}, "uniqueItems": True},
    "an unknown format": {"type": "string", "format": "path"},
    "an unknown type": {"type": "strange"},
    "a type of Python": {"type": "str"},
    "a look-ahead": {"type": "string", "pattern": "^(?!a).*$"},
    "a broken pattern": {"type": "string", "pattern": "("},
    "a condition": {"type": "object", "properties": {"a": {}}, "if": {"required": ["a"]}, "then": {"required": ["b"]}},
    "not": {"not": {"type": "string"}},
    "oneOf that overlaps": {"oneOf": [{"type": "string"}, {"type": "string", "maxLength": 3}]},
    "propertyNames": {"type": "object", "propertyNames": {"pattern": "^x"}},
    "a lost reference": {"$ref": "#/$defs/Nowhere"},
    "another document": {"$ref": "https://example.org/schema.json"},
    "an empty enum": {"enum": []},
    "an enum of null": {"type": "string", "enum": None},
    "properties of null": {"type": "object", "properties": None},
    "items that are no schema": {"type": "array", "items": "string"},
    "required that is no list": {"type": "object", "properties": {"a": {}}, "required": True},
    "a number of 2^60": {"const": 2**60 + 1},
    "a bound beyond 64 bits": {"type": "integer", "maximum": 2**64},
    "the least of 64 bits": {"type": "integer", "minimum": -(2**63)},
    "bounds of text": {"type": "integer", "minimum": "0"},
    "a large step": {"type": "integer", "multipleOf": 2**53},
    "nothing that fits": {"type": "integer", "minimum": 3, "maximum": 2},
    "minContains": {"type": "array", "contains": {"type": "string"}, "minContains": 2},
}
FIRST_LEVEL: dict[str, Any] = {
    "a type of null": {"type": None, "properties": {"a": {"type": "string"}}},
    "several types": {"type": ["object", "null"], "properties": {"a": {"type": "string"}}},
    "a text": {"type": "string"},
    "properties in a list": {"type": "object", "properties": []},
    "a property of null": {"type": "object", "properties": {"a": None}},
    "required of null": {"type": "object", "properties": {"a": {}}, "required": None},
    "required in each property": {"type": "object", "properties": {"a": {"type": "string", "required": True}}},
    "a required one that cannot be": {"type": "object", "properties": {"a": False}, "required": ["a"]},
    "a union": {"anyOf": [{"type": "object", "properties": {"a": {}}}, {"type": "object", "properties": {"b": {}}}]},
    "a reference": {"$ref": "#/$defs/A", "$defs": {"A": {"type": "object", "properties": {"a": {"type": "string"}}}}},
}
CASES = {name: having({"type": "object", "properties": {"x": one}}) for name, one in ODD.items()} | {
    name: having(one) for name, one in FIRST_LEVEL.items()
}
REQUESTS: list[dict[str, Any]] = [
    {"tools": [HELD]},
    {"tools": [], "tool_choice": "required"},
    {"tools": [], "tool_choice": {"type": "function", "function": {"name": "a"}}},
    {"tools": [], "response_format": {"type": "json_object"}},
]


@pytest.mark.few(4)
@pytest.mark.parametrize("more", REQUESTS, ids=["beside a strict one", "required", "named", "beside a format"])
@pytest.mark.parametrize("name", CASES)
async def test_unsupported_schema_of_non_strict_tool_is_accepted(name: str, more: dict[str, Any]) -> None:
    async with speaker(ONE) as api:
        await api.post(PATH, {"messages": HELLO, **more, "tools": [*more["tools"], *TOOLS, CASES[name]]})
        assert api.engine.seen[-1].params.grammar is not None


async def test_only_unsupported_tool_schemas_are_weakened() -> None:
    tools = [HELD, *TOOLS]
    for index, tool in enumerate(islice(CASES.values(), 8)):
        tools.append({**tool, "function": {**tool["function"], "name": f"odd_{index}"}})
    async with speaker(ONE) as api:
        answer = await api.http.post(PATH, json={"messages": HELLO, "tools": tools, "tool_choice": "required"})
        assert answer.status_code == 200
        grammar = api.engine.seen[-1].params.grammar.text
        assert '"city": {"type": "string"}' in grammar
    weakened = answer.headers["X-Schema-Weakened"].split(", ")
    look_ahead = 3 + list(CASES).index("a look-ahead")
    assert f"tools[{look_ahead}].function.parameters" in weakened
    assert "tools[1].function.parameters" not in weakened


async def test_weakened_schema_keeps_supported_keywords() -> None:
    other = {"p": {"type": "string", "format": "path"}, "s": {**ODD["uniqueItems"]}}
    async with speaker(ONE) as api:
        await api.post(PATH, {"messages": HELLO, "tools": [HELD, function("mcp", **other)]})
        grammar = api.engine.seen[-1].params.grammar.text
    assert '"items": {"type": "string"}' in grammar, "what can be held is held"
    assert "uniqueItems" not in grammar


async def test_unsupported_schema_of_strict_tool_is_rejected_by_path() -> None:
    async with speaker(ONE) as api:
        tools = [function("mcp", **ODD), strict(function("wrong", x={"const": 2**60 + 1}))]
        error = (await api.post(PATH, {"messages": HELLO, "tools": tools}, 400))["error"]
    assert error["message"].startswith(
        "tools[1].function.parameters: properties.x.const: 1152921504606846977 is beyond"
    )
    assert error["param"] == "tools"


@pytest.mark.parametrize("level", range(WEAKEST_LEVEL + 1))
@pytest.mark.parametrize("name", CASES)
def test_weakened_schema_is_object_schema_that_compiles(name: str, level: int) -> None:
    schema = weaken_schema(CASES[name]["function"]["parameters"], level)
    assert schema["type"] == "object"
    if level >= 2:
        source = LLMatcher.grammar_from_json_schema(json.dumps(schema))
        assert not LLMatcher(LLTokenizer("byte"), source, log_level=0).is_error()
