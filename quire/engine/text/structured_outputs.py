"""Converts vLLM's structured outputs to grammars."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from quire.engine.common.errors import InvalidRequest
from quire.engine.common.request_params import Grammar
from quire.engine.schemas.enforcement import check_exact_numbers, without_unenforced_formats
from quire.engine.schemas.object_closing import ClosedSchema, close_objects
from quire.engine.text.grammar_compiler import MAX_GRAMMAR_BYTES, choice_grammar, json_grammar
from quire.engine.text.structural_tags import structural_tag_grammar

if TYPE_CHECKING:
    from quire.engine.text.tokenizer import Tokenizer

CLOSE_OBJECTS_KEY = "disable_additional_properties"
CONSTRAINT_KINDS = ("json", "json_object", "regex", "choice", "grammar", "structural_tag")
_IGNORED_KEYS = {"disable_fallback", "disable_any_whitespace", "backend", CLOSE_OBJECTS_KEY}
"""All but CLOSE_OBJECTS_KEY are ignored, because the only backend allows at most one space after a comma or colon."""


class GrammarWithOpenObjects(NamedTuple):
    grammar: Grammar
    open_objects: tuple[str, ...] = ()
    """JSON pointers of objects that still allow undeclared properties, because it cannot be decided which to forbid."""


def requested_constraints(options: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Raises InvalidRequest if there is none."""
    options = {name: value for name, value in options.items() if value is not None and value is not False}
    for name in options:
        if name not in CONSTRAINT_KINDS and name not in _IGNORED_KEYS:
            raise InvalidRequest(f"structured_outputs.{name} is not supported", param="structured_outputs")
    constraints = [(way, options[way]) for way in CONSTRAINT_KINDS if way in options]
    if not constraints:
        raise InvalidRequest(
            f"structured_outputs needs one of {', '.join(CONSTRAINT_KINDS)}", param="structured_outputs"
        )
    return constraints


def constraint_grammar(
    kind: str, value: Any, *, close: bool, tokenizer: Tokenizer | None = None
) -> GrammarWithOpenObjects:
    """If `kind` is json, `value` is an object or JSON text. `close`: whether to forbid undeclared properties. Raises
    InvalidRequest.
    """
    if kind == "json_object":
        if value is not True:
            raise InvalidRequest("json_object must be true or false")
        return GrammarWithOpenObjects(json_grammar({"type": "object"}))
    if kind == "json":
        prepared = prepare_and_close_schema(_parse_schema(value) if isinstance(value, str) else value, close=close)
        return GrammarWithOpenObjects(json_grammar(prepared.schema), prepared.open_objects)
    if kind == "choice":
        if not isinstance(value, list) or not value or not all(isinstance(one, str) for one in value):
            raise InvalidRequest("choice must be a list of strings, at least one")
        return GrammarWithOpenObjects(choice_grammar(value))
    if kind == "structural_tag":
        tag = structural_tag_grammar(value, tokenizer, partial(prepare_and_close_schema, close=close))
        return GrammarWithOpenObjects(Grammar("lark", tag.lark), tag.open_objects)
    if not isinstance(value, str) or not value:
        raise InvalidRequest(f"{kind} must be a string, and not empty")
    return GrammarWithOpenObjects(Grammar("regex" if kind == "regex" else "lark", value))


def prepare_and_close_schema(schema: Any, *, close: bool, by_name: bool = False) -> ClosedSchema:
    """If closing would make a schema too long, it stays open. Raises InvalidRequest for too deep nesting, and for
    numbers that a grammar would round.
    """
    try:
        check_exact_numbers(schema)
        schema = without_unenforced_formats(schema)
        if not close:
            return ClosedSchema(schema, ())
        closed_schema = close_objects(schema, by_name=by_name)
        long = len(json.dumps(closed_schema.schema)) > MAX_GRAMMAR_BYTES >= len(json.dumps(schema))
    except RecursionError:
        raise InvalidRequest("the JSON schema is nested too deeply", param="grammar") from None
    return ClosedSchema(schema, ("",)) if long else closed_schema


def _parse_schema(schema: str) -> Any:
    try:
        return json.loads(schema)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"the schema is not JSON: {error}") from None
