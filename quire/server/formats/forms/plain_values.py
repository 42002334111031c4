"""Values between tags, where strings stand as they are and all others as literals: which of the two a text is."""

from __future__ import annotations

import ast
import re
from typing import Any

from quire.server.formats.forms.literal_rules import Words
from quire.server.formats.schemas import ANY, Variant, type_of
from quire.server.formats.tools import strict_json

NUMBER_BEGUN = re.compile(r"-?[0-9]*\.?[0-9]*([eE][+-]?[0-9]*)?")
PYTHON = {"True": "true", "False": "false", "None": "null"}


def is_text(variants: list[Variant]) -> bool:
    """Whether values are strings and nothing else, so that their text need not be looked at."""
    return all(variant.type == "string" for variant in variants)


def may_be_literal(begun: str, variants: list[Variant], words: Words) -> bool:
    """Whether a text that begins so may turn out to be another value than a string."""
    kinds = {variant.kind for variant in variants}
    if kinds & {ANY} or not kinds & {"string"}:
        return True
    constants = {"boolean": (words.true, words.false, "true", "false"), "null": (words.null, "null")}
    if any(word.startswith(begun) for kind in kinds & constants.keys() for word in constants[kind]):
        return True
    if "number" in kinds and NUMBER_BEGUN.fullmatch(begun):
        return True
    return bool(kinds & {"array", "object"}) and begun[:1] in ("", "[", "{", "(")


def as_json(written: str, variants: list[Variant], words: Words) -> str:
    """The value of a text as JSON.

    Where a schema allows strings among others, a text is another value only if it is, from its first character to its
    last, how the template writes one that the schema allows; `null` is null. Where it allows no strings, or says
    nothing, a text is a string only if it is no literal of JSON or Python.
    """
    kinds = {variant.kind for variant in variants}
    if "string" in kinds and ANY not in kinds:
        enums = [variant.enum for variant in variants if variant.type == "string"]
        if any(enum is not None and written in enum for enum in enums):
            return strict_json.write(written)
        found = _literal(written, {"null": "null", "true": "true", "false": "false", **_constants(words)}, words)
        fits = found is not None and written == written.strip() and _is_allowed(strict_json.parse(found), variants)
        return found if found is not None and fits else strict_json.write(written)
    text = written.strip()
    constants = {**PYTHON, **_constants(words)}
    if kinds <= {"boolean", "null"}:
        constants |= {word.lower(): json for word, json in constants.items()}
        text = text.lower() if text.lower() in constants else text
    found = _literal(text, constants, words, python=True)
    return strict_json.write(written) if found is None else found


def _constants(words: Words) -> dict[str, str]:
    return {words.true: "true", words.false: "false", words.null: "null"}


def _literal(written: str, constants: dict[str, str], words: Words, *, python: bool = False) -> str | None:
    """The JSON of a literal; None for any other text. Literals of Python are read too with `python`, or where the
    template writes such lists or objects."""
    if written in constants:
        return constants[written]
    try:
        strict_json.parse(written)
        return written
    except ValueError:
        pass
    if written[:1] not in ("[", "{", "("):
        return None
    if python or not (words.json_lists and words.json_objects):
        try:
            return strict_json.write(ast.literal_eval(written))
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            pass
    return None


def _is_allowed(value: Any, variants: list[Variant]) -> bool:
    """Whether a value is of one of the types; a string is not, for strings are written without quotes."""
    type = type_of(value)
    for variant in variants:
        same = type == variant.type or (type == "integer" and variant.type == "number")
        if same and type != "string" and (variant.enum is None or value in variant.enum):
            return True
    return False
