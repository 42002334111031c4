from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from quire.engine.schemas.keywords import Schema, SchemaReferences

CLOSING_KEYWORDS = frozenset({"additionalProperties", "unevaluatedProperties", "patternProperties"})
_COUNTING_KEYWORDS = CLOSING_KEYWORDS | {"minProperties", "maxProperties", "propertyNames"}
"""The meaning of these keywords may change if an object loses properties."""
ANNOTATION_KEYWORDS = frozenset({"title", "description", "default", "examples", "$comment", "deprecated", "readOnly"})
SCALAR_TYPES = frozenset({"string", "integer", "number", "boolean", "null"})


class UndecidableSchema(Exception):
    """It cannot be decided which properties to forbid."""


class ConditionalKeywords:
    def __init__(self, schemas: Sequence[dict[str, Any]], references: SchemaReferences) -> None:
        """Raises UnresolvableReference and UndecidableSchema."""
        self._references = references
        self._seen_ids: set[int] = set()
        self.property_names: dict[str, None] = {}
        self.has_properties = False
        self.has_closers = False
        """True if an asserted schema limits the properties that it does not name."""
        self.is_undecidable = False
        """True if forbidding properties may change whether a condition holds."""
        for one in schemas:
            self._collect_from_conditional_keywords(one, asserted=True)

    @property
    def num_schemas(self) -> int:
        return len(self._seen_ids)

    def _collect_from_conditional_keywords(self, schema: dict[str, Any], *, asserted: bool) -> None:
        """`asserted`: the schemas must hold, unlike those of a condition."""
        for keyword in ("if", "not"):
            self._collect_names_and_flags(schema.get(keyword), asserted=False)
        for keyword in ("then", "else"):
            self._collect_names_and_flags(schema.get(keyword), asserted=asserted)
        for keyword in ("dependentSchemas", "dependencies"):
            for name, member in require_schema_map(schema, keyword).items():
                self.property_names[name] = None
                self._collect_names_and_flags(member, asserted=asserted)

    def _collect_names_and_flags(self, schema: Any, *, asserted: bool) -> None:
        if isinstance(schema, list):  # names of properties in `dependencies`
            self.property_names |= dict.fromkeys(name for name in schema if isinstance(name, str))
        if not isinstance(schema, dict) or id(schema) in self._seen_ids:
            return
        self._seen_ids.add(id(schema))
        self.property_names |= dict.fromkeys(
            [*require_schema_map(schema, "properties"), *names_in_required_and_constants([schema])]
        )
        self.has_properties |= asserted and "properties" in schema
        self.has_closers |= asserted and bool(CLOSING_KEYWORDS & schema.keys())
        self.is_undecidable |= bool(
            (_COUNTING_KEYWORDS & schema.keys()) - (CLOSING_KEYWORDS if asserted else frozenset())
        )
        self._collect_from_conditional_keywords(schema, asserted=asserted)
        for keyword in ("allOf", "anyOf", "oneOf"):
            for one in require_schema_list(schema[keyword]) if keyword in schema else ():
                self._collect_names_and_flags(one, asserted=asserted)
        if "$ref" in schema:
            self._collect_names_and_flags(self._references.resolve(schema["$ref"]), asserted=asserted)


def require_schema_list(value: Any) -> list[Schema]:
    if not isinstance(value, list) or not value:
        raise UndecidableSchema
    return value


def require_schema_map(schema: dict[str, Any], keyword: str) -> dict[str, Any]:
    value = schema.get(keyword, {})
    if not isinstance(value, dict):
        raise UndecidableSchema
    return value


def is_bare_reference(schema: Schema) -> bool:
    return isinstance(schema, dict) and "$ref" in schema and schema.keys() <= {"$ref", *ANNOTATION_KEYWORDS}


def required_names(schemas: Sequence[dict[str, Any]]) -> list[str]:
    names: dict[str, None] = {}
    for one in schemas:
        value = one.get("required")
        if isinstance(value, list):
            names |= dict.fromkeys(name for name in value if isinstance(name, str))
    return list(names)


def names_in_required_and_constants(schemas: Sequence[dict[str, Any]]) -> list[str]:
    names = required_names(schemas)
    for one in schemas:
        for name, others in require_schema_map(one, "dependentRequired").items():
            names += [name, *(other for other in others if isinstance(other, str))] if isinstance(others, list) else []
        enum = one.get("enum")
        for value in (one.get("const"), *(enum if isinstance(enum, list) else ())):
            names += value if isinstance(value, dict) else ()
    return names


def named_properties_reach_minimum(schemas: Sequence[dict[str, Any]], written: dict[str, Schema]) -> bool:
    counts = [one["minProperties"] for one in schemas if isinstance(one.get("minProperties"), int | float)]
    surely = {
        name
        for name, schema in written.items()
        if schema is True or (isinstance(schema, dict) and schema.keys() <= {"type", *ANNOTATION_KEYWORDS})
    }
    return max(counts, default=0) <= len(surely | {*required_names(schemas)})


def common_types(schemas: Sequence[dict[str, Any]]) -> set[str]:
    known = {*SCALAR_TYPES, "object", "array"}
    types = set(known)
    for one in schemas:
        names = set(named_types(one)) or types
        types &= {*names, "integer"} if "number" in names else names
        if not names <= known:
            raise UndecidableSchema
    return types


def named_types(schema: dict[str, Any]) -> list[str]:
    """Raises UndecidableSchema for invalid types."""
    value = schema.get("type")
    if value is None:
        return []
    names = value if isinstance(value, list) else [value]
    if not all(isinstance(name, str) for name in names):
        raise UndecidableSchema
    return names


def has_positional_items(schemas: Sequence[dict[str, Any]]) -> bool:
    return any(name in one for one in schemas for name in ("prefixItems", "additionalItems")) or any(
        isinstance(one.get("items"), list) for one in schemas
    )


def may_hold_objects(schema: Schema) -> bool:
    """True if values may be objects or lists. False also for `true`, because it describes no properties."""
    if not isinstance(schema, dict):
        return False
    names = named_types(schema)
    return not names or not SCALAR_TYPES.issuperset(names)
