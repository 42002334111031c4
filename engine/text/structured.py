"""Structured outputs as vLLM's requests and its `StructuredOutputsParams` ask for them, as grammars."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from quire.engine.errors import InvalidRequest
from quire.engine.text.grammar import choice_grammar, json_grammar
from quire.engine.types import Grammar

WAYS = ("json", "json_object", "regex", "choice", "grammar")
_HARMLESS = {"disable_fallback", "disable_any_whitespace", "backend"}
"""Keys of structured_outputs that change nothing here: there is one backend, and it allows one space at most."""


def asked_ways(given: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """The ways that structured_outputs asks for, each with its value. Raises InvalidRequest where there is none."""
    given = {name: value for name, value in given.items() if value is not None and value is not False}
    for name in given:
        if name not in WAYS and name not in _HARMLESS:
            raise InvalidRequest(f"structured_outputs.{name} is not supported", param="structured_outputs")
    found = [(way, given[way]) for way in WAYS if way in given]
    if not found:
        raise InvalidRequest(f"structured_outputs needs one of {', '.join(WAYS)}", param="structured_outputs")
    return found


def structured_grammar(way: str, value: Any) -> Grammar:
    """The grammar of one of WAYS: for json a schema, as an object or JSON text. Raises InvalidRequest."""
    if way == "json_object":
        if value is not True:
            raise InvalidRequest("json_object must be true or false")
        return json_grammar({"type": "object"})
    if way == "json":
        return json_grammar(_parsed(value) if isinstance(value, str) else value)
    if way == "choice":
        if not isinstance(value, list) or not value or not all(isinstance(one, str) for one in value):
            raise InvalidRequest("choice must be a list of strings, at least one")
        return choice_grammar(value)
    if not isinstance(value, str) or not value:
        raise InvalidRequest(f"{way} must be a string, and not empty")
    return Grammar("regex" if way == "regex" else "lark", value)


def _parsed(schema: str) -> Any:
    try:
        return json.loads(schema)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"the schema is not JSON: {error}") from None
