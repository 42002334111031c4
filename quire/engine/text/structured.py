"""Structured outputs as vLLM's requests and its `StructuredOutputsParams` ask for them, as grammars."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from quire.engine.errors import InvalidRequest
from quire.engine.schemas.closing import Closed, closed
from quire.engine.schemas.enforceable import check_numbers, without_annotations
from quire.engine.text.grammar import MAX_GRAMMAR_BYTES, choice_grammar, json_grammar
from quire.engine.types import Grammar

CLOSING = "disable_additional_properties"
"""vLLM's name of the key of structured_outputs, and of the setting, by which objects are closed."""
WAYS = ("json", "json_object", "regex", "choice", "grammar")
_HARMLESS = {"disable_fallback", "disable_any_whitespace", "backend", CLOSING}
"""Keys of structured_outputs that ask for no way: there is one backend, and it allows one space at most."""


class Structured(NamedTuple):
    grammar: Grammar
    open: tuple[str, ...] = ()
    """JSON pointers of objects of its schema that stay open, as it could not be decided what they are merged of."""


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


def structured_grammar(way: str, value: Any, *, close: bool) -> Structured:
    """The grammar of one of WAYS: for json a schema, as an object or JSON text. `close`: objects that name properties,
    and say nothing of others, have no others. Raises InvalidRequest."""
    if way == "json_object":
        if value is not True:
            raise InvalidRequest("json_object must be true or false")
        return Structured(json_grammar({"type": "object"}))
    if way == "json":
        found = enforced_schema(_parsed(value) if isinstance(value, str) else value, close=close)
        return Structured(json_grammar(found.schema), found.open)
    if way == "choice":
        if not isinstance(value, list) or not value or not all(isinstance(one, str) for one in value):
            raise InvalidRequest("choice must be a list of strings, at least one")
        return Structured(choice_grammar(value))
    if not isinstance(value, str) or not value:
        raise InvalidRequest(f"{way} must be a string, and not empty")
    return Structured(Grammar("regex" if way == "regex" else "lark", value))


def enforced_schema(schema: Any, *, close: bool, by_name: bool = False) -> Closed:
    """The schema as a grammar holds answers to it; `by_name` is closed's. One that would be too long where it is closed
    stays open. Raises InvalidRequest for numbers that a grammar would round."""
    try:
        check_numbers(schema)
        schema = without_annotations(schema)
        if not close:
            return Closed(schema, ())
        found = closed(schema, by_name=by_name)
        long = len(json.dumps(found.schema)) > MAX_GRAMMAR_BYTES >= len(json.dumps(schema))
    except RecursionError:
        raise InvalidRequest("the JSON schema is nested too deeply", param="grammar") from None
    return Closed(schema, ("",)) if long else found


def _parsed(schema: str) -> Any:
    try:
        return json.loads(schema)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"the schema is not JSON: {error}") from None
