"""Adapts JSON schemas to what grammars can enforce."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from quire.engine.common.errors import InvalidRequest
from quire.engine.schemas.keywords import (
    DEFINITION_KEYWORDS,
    SCHEMA_KEYWORDS,
    SCHEMA_LIST_KEYWORDS,
    SCHEMA_MAP_KEYWORDS,
    Schema,
    SchemaReferences,
    UnresolvableReference,
    walk_schemas,
)
from quire.engine.schemas.keywords import map_subschemas as with_own_children

ENFORCED_FORMATS = frozenset(
    {"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri", "unknown"}
)
_BOUND_KEYWORDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_MAX_INTEGER = 2**63 - 1
_TYPE_NAMES = frozenset({"string", "integer", "number", "boolean", "null", "array", "object"})
_ENFORCED_KEYWORDS = frozenset(
    {
        "$ref",
        "type",
        "enum",
        "const",
        "anyOf",
        "allOf",
        "properties",
        "required",
        "additionalProperties",
        "patternProperties",
        "items",
        "prefixItems",
        "minItems",
        "maxItems",
        "minLength",
        "maxLength",
        "pattern",
        "format",
        *_BOUND_KEYWORDS,
        *DEFINITION_KEYWORDS,
        "$schema",
        "$id",
        "$anchor",
    }
)
_TYPE_KEYWORDS = _ENFORCED_KEYWORDS - {
    "pattern",
    "patternProperties",
    "format",
    "minItems",
    "maxItems",
    "minLength",
    "maxLength",
    "allOf",
    *_BOUND_KEYWORDS,
}
_COUNT_KEYWORDS = ("minItems", "maxItems", "minLength", "maxLength")
WEAKEST_LEVEL = 3


def without_unenforced_formats(schema: Schema) -> Schema:
    def drop_annotation(one: dict[str, Any]) -> dict[str, Any]:
        if "format" not in one or (isinstance(one["format"], str) and one["format"] in ENFORCED_FORMATS):
            return one
        return {name: value for name, value in one.items() if name != "format"}

    return map_schemas_bottom_up(schema, drop_annotation)


def map_schemas_bottom_up(schema: Schema, change: Callable[[dict[str, Any]], Any]) -> Schema:
    if not isinstance(schema, dict):
        return schema
    copy = with_own_children(schema, lambda _, one: map_schemas_bottom_up(one, change))
    for name in DEFINITION_KEYWORDS:
        if isinstance(copy.get(name), dict):
            copy[name] = {key: map_schemas_bottom_up(one, change) for key, one in copy[name].items()}
    return change(copy)


def check_exact_numbers(schema: Schema) -> None:
    """Raises InvalidRequest that names a number which a grammar would round, because grammars use doubles."""
    for place, one in walk_schemas(schema):
        for keyword in _BOUND_KEYWORDS:
            if not _is_exact_bound(one.get(keyword)):
                raise _inexact_error(f"{place}/{keyword}", one[keyword])
        values = one.get("enum")
        for value in [one.get("const"), *(values if isinstance(values, list) else [])]:
            if (wrong := _find_inexact_integer(value)) is not None:
                raise _inexact_error(f"{place}/{'const' if value is one.get('const') else 'enum'}", wrong)


def _inexact_error(place: str, number: int) -> InvalidRequest:
    shown = str(number) if abs(number) < 10**40 else "an integer of many digits"
    why = "is beyond 2^53, which cannot be enforced exactly; use a string in the schema"
    return InvalidRequest(f"{place.lstrip('/').replace('/', '.')}: {shown} {why}", param="grammar")


def _find_inexact_integer(value: Any) -> int | None:
    pending = [value]
    while pending:
        one = pending.pop()
        if isinstance(one, dict):
            pending += one.values()
        elif isinstance(one, list):
            pending += one
        elif isinstance(one, int) and not _is_exact(one):
            return one
    return None


def _is_exact(number: int) -> bool:
    try:
        return int(float(number)) == number
    except OverflowError:
        return False


def _is_exact_bound(number: Any) -> bool:
    """Integers are limited to 64 bits. The largest 64-bit integer counts as exact, although no double equals it."""
    return not isinstance(number, int) or number == _MAX_INTEGER or (abs(number) <= _MAX_INTEGER and _is_exact(number))


def weaken_schema(schema: Schema, level: int) -> dict[str, Any]:
    """Return a schema that allows at least as much, and that a grammar more likely supports. Level 0 drops unenforced
    keywords and invalid values. Level 1 keeps types, properties, constants and alternatives. Level 2 keeps argument
    names and simple types. Level 3 only requires an object.
    """
    if level >= WEAKEST_LEVEL or not isinstance(schema, dict):
        return {"type": "object"}
    if level == 2:
        return _argument_types_schema(schema)
    try:
        references: SchemaReferences | None = SchemaReferences(schema)
    except UnresolvableReference:
        references = None
    weakened = map_schemas_bottom_up(
        schema, lambda one: _keep_enforceable(one, _TYPE_KEYWORDS if level else _ENFORCED_KEYWORDS, references)
    )
    return {**weakened, "type": "object"} if isinstance(weakened, dict) else {"type": "object"}


def _keep_enforceable(
    schema: dict[str, Any], keywords: frozenset[str], references: SchemaReferences | None
) -> dict[str, Any]:
    """Subschemas must have been processed already."""
    if isinstance(schema.get("oneOf"), list) and "anyOf" not in schema:
        schema = {**schema, "anyOf": schema["oneOf"]}
    enforceable = {
        name: value
        for name, value in schema.items()
        if name in keywords and _is_enforceable(name, value, schema, references)
    }
    if "patternProperties" in schema and "patternProperties" not in enforceable:
        enforceable.pop("additionalProperties", None)
    if "prefixItems" in schema and "prefixItems" not in enforceable:
        enforceable.pop("items", None)
    if isinstance(enforceable.get("required"), list):
        enforceable["required"] = [
            name for name in enforceable["required"] if enforceable.get("properties", {}).get(name) is not False
        ]
    return enforceable


def _is_enforceable(keyword: str, value: Any, schema: Mapping[str, Any], references: SchemaReferences | None) -> bool:
    if keyword == "$ref":
        return references is not None and _is_resolvable(value, references)
    if keyword == "format" and "pattern" in schema:
        return False
    is_enforceable_value = _VALUE_CHECKS.get(keyword)
    return is_enforceable_value is None or is_enforceable_value(value)


def _is_type_value(value: Any) -> bool:
    kinds = [value] if isinstance(value, str) else value
    return isinstance(kinds, list) and bool(kinds) and all(kind in _TYPE_NAMES for kind in map(str, kinds))


def _is_enforceable_const(value: Any) -> bool:
    return _find_inexact_integer(value) is None


def _is_enforceable_enum(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and _find_inexact_integer(value) is None


def _is_name_list(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_enforced_format(value: Any) -> bool:
    return isinstance(value, str) and value in ENFORCED_FORMATS


def _is_bound_value(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and _is_exact_bound(value)


def _is_count_value(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_schema(value: Any) -> bool:
    return isinstance(value, dict | bool)


def _is_schema_map(value: Any) -> bool:
    return isinstance(value, dict) and all(map(_is_schema, value.values()))


def _is_schema_list(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(map(_is_schema, value))


def _is_items_value(value: Any) -> bool:
    return all(map(_is_schema, value)) if isinstance(value, list) else _is_schema(value)


_VALUE_CHECKS: Mapping[str, Callable[[Any], bool]] = {
    **dict.fromkeys(SCHEMA_KEYWORDS, _is_schema),
    **dict.fromkeys(SCHEMA_LIST_KEYWORDS, _is_schema_list),
    **dict.fromkeys(SCHEMA_MAP_KEYWORDS, _is_schema_map),
    **dict.fromkeys(DEFINITION_KEYWORDS, _is_schema_map),
    **dict.fromkeys(_BOUND_KEYWORDS, _is_bound_value),
    **dict.fromkeys(_COUNT_KEYWORDS, _is_count_value),
    "items": _is_items_value,
    "type": _is_type_value,
    "const": _is_enforceable_const,
    "enum": _is_enforceable_enum,
    "required": _is_name_list,
    "pattern": _is_text,
    "format": _is_enforced_format,
}


def _is_resolvable(reference: Any, references: SchemaReferences) -> bool:
    try:
        references.resolve(reference)
    except UnresolvableReference:
        return False
    return True


def _argument_types_schema(schema: dict[str, Any]) -> dict[str, Any]:
    named, required = schema.get("properties"), schema.get("required")
    if not isinstance(named, dict):
        return {"type": "object"}
    properties: dict[str, Any] = {}
    for name, one in named.items():
        kind = one.get("type") if isinstance(one, dict) else None
        plain = isinstance(kind, str) and kind in _TYPE_NAMES and not {"enum", "const", "$ref"} & one.keys()
        properties[name] = {"type": kind} if plain else True
    names = [name for name in required if name in properties] if isinstance(required, list) else []
    return {"type": "object", "properties": properties, "required": names}


def repair_argument_schema(schema: dict[str, Any] | None) -> dict[str, Any] | None:
    """Parsers rely on the first level: an object with schemas as properties."""
    if not schema:
        return schema
    repaired = {name: value for name, value in schema.items() if name not in ("type", "properties", "required")}
    named, required = schema.get("properties"), schema.get("required")
    if isinstance(named, dict):
        repaired["properties"] = {name: one if isinstance(one, dict | bool) else True for name, one in named.items()}
    if isinstance(required, list):
        repaired["required"] = [name for name in required if isinstance(name, str)]
    return {"type": "object", **repaired}
