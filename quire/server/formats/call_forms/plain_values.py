"""Values between tags: plain strings, or literals of other types."""

from __future__ import annotations

import ast
import re
from typing import Any

from quire.server.formats.call_forms.lark_rules import LiteralSpelling
from quire.server.formats.schema_node import ANY_TYPE, TypeVariant, json_type_of_value
from quire.server.formats.tools import strict_json

PARTIAL_NUMBER = re.compile(r"-?[0-9]*\.?[0-9]*([eE][+-]?[0-9]*)?")
JSON_BY_PYTHON_CONSTANT = {"True": "true", "False": "false", "None": "null"}


def is_string_only(variants: list[TypeVariant]) -> bool:
    return all(variant.type == "string" for variant in variants)


def may_be_literal(begun: str, variants: list[TypeVariant], spelling: LiteralSpelling) -> bool:
    kinds = {variant.numeric_merged_type for variant in variants}
    if kinds & {ANY_TYPE} or not kinds & {"string"}:
        return True
    constants = {"boolean": (spelling.true, spelling.false, "true", "false"), "null": (spelling.null, "null")}
    if any(word.startswith(begun) for kind in kinds & constants.keys() for word in constants[kind]):
        return True
    if "number" in kinds and PARTIAL_NUMBER.fullmatch(begun):
        return True
    return bool(kinds & {"array", "object"}) and begun[:1] in ("", "[", "{", "(")


def value_to_json(written: str, variants: list[TypeVariant], spelling: LiteralSpelling) -> str:
    """If the schema allows strings but not any type, the text is a string, unless it is a literal without surrounding
    whitespace whose value has another type that the schema allows. Otherwise, the text is a string only if it is not a
    JSON or Python literal.
    """
    kinds = {variant.numeric_merged_type for variant in variants}
    if "string" in kinds and ANY_TYPE not in kinds:
        enums = [variant.enum for variant in variants if variant.type == "string"]
        if any(enum is not None and written in enum for enum in enums):
            return strict_json.write_json(written)
        literal_json = _literal_to_json_or_none(
            written,
            {"null": "null", "true": "true", "false": "false", **_json_constant_by_spelling(spelling)},
            spelling,
        )
        fits = (
            literal_json is not None
            and written == written.strip()
            and _matches_any_nonstring_variant(strict_json.parse_json(literal_json), variants)
        )
        return literal_json if literal_json is not None and fits else strict_json.write_json(written)
    text = written.strip()
    constants = {**JSON_BY_PYTHON_CONSTANT, **_json_constant_by_spelling(spelling)}
    if kinds <= {"boolean", "null"}:
        constants |= {word.lower(): json for word, json in constants.items()}
        text = text.lower() if text.lower() in constants else text
    literal_json = _literal_to_json_or_none(text, constants, spelling, python=True)
    return strict_json.write_json(written) if literal_json is None else literal_json


def _json_constant_by_spelling(spelling: LiteralSpelling) -> dict[str, str]:
    return {spelling.true: "true", spelling.false: "false", spelling.null: "null"}


def _literal_to_json_or_none(
    written: str, constants: dict[str, str], spelling: LiteralSpelling, *, python: bool = False
) -> str | None:
    """Also accepts Python's lists, tuples and dicts if `python` is True, or if the template does not write lists and
    objects as JSON.
    """
    if written in constants:
        return constants[written]
    try:
        strict_json.parse_json(written)
        return written
    except ValueError:
        pass
    if written[:1] not in ("[", "{", "("):
        return None
    if python or not (spelling.json_lists and spelling.json_objects):
        try:
            return strict_json.write_json(ast.literal_eval(written))
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            pass
    return None


def _matches_any_nonstring_variant(value: Any, variants: list[TypeVariant]) -> bool:
    """Strings never match, because they are written unquoted."""
    type = json_type_of_value(value)
    for variant in variants:
        same = type == variant.type or (type == "integer" and variant.type == "number")
        if same and type != "string" and (variant.enum is None or value in variant.enum):
            return True
    return False
