"""What a JSON schema says of values: their types, and the schemas of what is in them, with its references resolved.

Readers of calls and the grammars that hold calls share this, so that both take a value for the same type.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

TYPES = ("string", "number", "integer", "boolean", "null", "array", "object")
ANY = "any"
"""The type of values about which a schema says nothing."""
MAX_NODES = 500
"""Schemas that are looked at to find the types of one value; behind them it may be of any type."""
MAX_DEPTH = 40
"""Schemas inside one another, by keywords that combine them and by references."""
MAX_VARIANTS = 32
COMBINING = frozenset({"$ref", "allOf", "anyOf", "oneOf"})
ANNOTATIONS = frozenset({"title", "description", "default", "examples", "deprecated", "$comment", "$id", "$schema"})
DEFINITIONS = frozenset({"$defs", "definitions"})
OF_NAMES = frozenset({"properties", "patternProperties", "dependentSchemas"})
"""Keywords with a schema for each of several names."""
OF_VALUES = frozenset({"const", "enum", *ANNOTATIONS})
"""Keywords whose values are no schemas."""
TELLING = {
    "properties": "object",
    "additionalProperties": "object",
    "patternProperties": "object",
    "items": "array",
    "prefixItems": "array",
    "pattern": "string",
    "minLength": "string",
    "maxLength": "string",
    "minimum": "number",
    "maximum": "number",
    "multipleOf": "number",
}
"""Keywords that tell the type where `type` is missing."""


@dataclass(frozen=True, slots=True)
class Variant:
    """One type that values may have, with the schema of values of that type: without $ref, allOf, anyOf and oneOf,
    which are merged into it."""

    type: str
    schema: Mapping[str, Any]

    @property
    def kind(self) -> str:
        """The type, with integers among the numbers."""
        return "number" if self.type == "integer" else self.type

    @property
    def enum(self) -> list[Any] | None:
        found = self.schema.get("enum")
        return found if isinstance(found, list) else None


@dataclass(frozen=True, slots=True)
class SchemaNode:
    """A schema inside a document, in which its references are looked up."""

    schema: Any
    document: Any

    @classmethod
    def whole(cls, schema: Any) -> SchemaNode:
        return cls(schema, schema)

    def variants(self) -> list[Variant]:
        """The types that values may have; never empty: what allows nothing is taken to allow anything."""
        return _Resolution(self.document).variants(self.schema, frozenset())

    def kinds(self) -> frozenset[str]:
        return frozenset(variant.kind for variant in self.variants())

    def at(self, schema: Any) -> SchemaNode:
        """Another schema of the same document."""
        return SchemaNode(schema, self.document)

    def property(self, name: str) -> SchemaNode:
        """The schema of a value in an object."""
        found: list[Any] = []
        for schema in self._objects():
            known = _mapping(schema.get("properties"))
            if name in known:
                found.append(known[name])
                continue
            # Which pattern a name matches is not tried: a pattern of a caller's may take for ever.
            rest = [*_mapping(schema.get("patternProperties")).values(), schema.get("additionalProperties")]
            found += [one for one in rest if isinstance(one, Mapping)]
        return self._one_of(found)

    def properties(self) -> list[tuple[str, SchemaNode, bool]]:
        """The known names of an object's values: each with its schema, and whether it must be there."""
        objects = list(self._objects())
        names = dict.fromkeys(name for schema in objects for name in _mapping(schema.get("properties")))
        required = [_sequence(schema.get("required")) for schema in objects]
        found = [(name, self.property(name), all(name in one for one in required)) for name in names]
        return [one for one in found if one[1].schema is not False]

    def item(self, index: int) -> SchemaNode:
        """The schema of a value in a list."""
        found: list[Any] = []
        for variant in self.variants():
            if variant.type in ("array", ANY):
                first, rest = _sequence(variant.schema.get("prefixItems")), variant.schema.get("items")
                found += [first[index]] if index < len(first) else [rest] if isinstance(rest, Mapping) else []
        return self._one_of(found)

    def standalone(self) -> Any:
        """The schema with all definitions that it refers to, so that it can be read without its document."""
        return _Extraction(self.document).extract(self.schema)

    def _objects(self) -> Iterator[Mapping[str, Any]]:
        return (variant.schema for variant in self.variants() if variant.type in ("object", ANY))

    def _one_of(self, schemas: Sequence[Any]) -> SchemaNode:
        distinct = [one for place, one in enumerate(schemas) if one not in schemas[:place]]
        return self.at(distinct[0] if len(distinct) == 1 else {"anyOf": distinct} if distinct else True)


class _Resolution:
    """Finds the variants of one schema."""

    def __init__(self, document: Any) -> None:
        self._document = document
        self._left = MAX_NODES

    def variants(self, schema: Any, followed: frozenset[str], depth: int = 0) -> list[Variant]:
        """`followed`: the references that led here, which are not followed again."""
        self._left -= 1
        if not isinstance(schema, Mapping) or self._left < 0 or depth > MAX_DEPTH:
            return [Variant(ANY, {})]
        found = _own_variants({name: value for name, value in schema.items() if name not in COMBINING | DEFINITIONS})
        reference = schema.get("$ref")
        if isinstance(reference, str) and reference not in followed:
            target = referred(reference, self._document)
            found = _both(found, self.variants(target, followed | {reference}, depth + 1))
        for member in _sequence(schema.get("allOf")):
            found = _both(found, self.variants(member, followed, depth + 1))
        for name in ("anyOf", "oneOf"):
            members = [one for one in _sequence(schema.get(name)) if one is not False]
            if members:
                either = [one for member in members for one in self.variants(member, followed, depth + 1)]
                found = _both(found, either)
        return found


def _own_variants(schema: Mapping[str, Any]) -> list[Variant]:
    """What the keywords of one schema say, without those that combine it with others."""
    types = schema.get("type")
    names = [one for one in (types if isinstance(types, list) else [types]) if one in TYPES]
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(values, list) and values:
        if schema.get("nullable") is True and None not in values:
            values = [*values, None]
        groups: dict[str, list[Any]] = {}
        for value in values:
            groups.setdefault(type_of(value), []).append(value)
        allowed = {kind: group for kind, group in groups.items() if not names or any(_meet(kind, n) for n in names)}
        return [Variant(kind, {"enum": group}) for kind, group in (allowed or groups).items()]
    if not names:
        told = dict.fromkeys(kind for name, kind in TELLING.items() if name in schema)
        return [Variant(next(iter(told)) if len(told) == 1 else ANY, schema)]
    if schema.get("nullable") is True and "null" not in names:  # as OpenAPI 3.0 says it
        names = [*names, "null"]
    return [Variant(name, {"type": "null"} if name == "null" else {**schema, "type": name}) for name in names]


def _both(left: Sequence[Variant], right: Sequence[Variant]) -> list[Variant]:
    """The variants of values that are of both. Where none can be, those of one: the more telling."""
    found = []
    for one in left:
        for other in right:
            kind = _meet(one.type, other.type)
            if kind:
                found.append(Variant(kind, _merged(one.schema, other.schema, kind)))
    if not found:
        return list(left if any(one.type != ANY for one in left) else right)
    if len(found) > MAX_VARIANTS:
        return [
            Variant(kind, {} if kind == ANY else {"type": kind}) for kind in dict.fromkeys(one.type for one in found)
        ]
    return found


def _meet(one: str, other: str) -> str:
    """The type of values that are of both types; "" if there are none."""
    if one == other or other == ANY:
        return one
    if one == ANY:
        return other
    return "integer" if {one, other} == {"integer", "number"} else ""


def _merged(one: Mapping[str, Any], other: Mapping[str, Any], kind: str) -> dict[str, Any]:
    merged: dict[str, Any] = {**other, **one}
    for name in one.keys() & other.keys():
        mine, theirs = one[name], other[name]
        if mine == theirs or name in ANNOTATIONS or name == "type":
            continue
        if name == "properties" and isinstance(mine, Mapping) and isinstance(theirs, Mapping):
            shared = {key: {"allOf": [mine[key], theirs[key]]} for key in mine if key in theirs}
            merged[name] = {**mine, **theirs, **shared}
        elif name == "required" and isinstance(mine, list) and isinstance(theirs, list):
            merged[name] = [*mine, *(one for one in theirs if one not in mine)]
        elif name == "enum" and isinstance(mine, list) and isinstance(theirs, list):
            merged[name] = [value for value in mine if value in theirs] or mine
        else:
            merged["allOf"] = [*_sequence(merged.get("allOf")), {name: theirs}]
    if kind != ANY and "enum" not in merged:
        merged["type"] = kind
    return merged


class _Extraction:
    """Cuts one schema out of a document, with what it refers to."""

    def __init__(self, document: Any) -> None:
        self._document = document
        self._names: dict[str, str] = {}
        """What references are called in the extract."""
        self._waiting: list[str] = []

    def extract(self, schema: Any) -> Any:
        extract = self._copy(schema)
        definitions: dict[str, Any] = {}
        while self._waiting:
            reference = self._waiting.pop()
            definitions[self._names[reference]] = self._copy(referred(reference, self._document))
        return {**extract, "$defs": definitions} if definitions and isinstance(extract, dict) else extract

    def _copy(self, schema: Any) -> Any:
        if not isinstance(schema, Mapping):
            return [self._copy(one) for one in schema] if isinstance(schema, list) else schema
        copy: dict[str, Any] = {}
        for name, value in schema.items():
            if name in DEFINITIONS:
                continue
            if name == "$ref" and isinstance(value, str):
                copy[name] = self._renamed(value)
            elif name in OF_NAMES and isinstance(value, Mapping):
                copy[name] = {key: self._copy(one) for key, one in value.items()}
            else:
                copy[name] = value if name in OF_VALUES else self._copy(value)
        return copy

    def _renamed(self, reference: str) -> str:
        if referred(reference, self._document) is None:
            return reference  # it leads nowhere; whoever compiles it says so
        if reference not in self._names:
            self._names[reference] = f"schema{len(self._names)}"
            self._waiting.append(reference)
        return f"#/$defs/{self._names[reference]}"


def referred(reference: str, document: Any) -> Any:
    """What a reference leads to; None if it leads nowhere."""
    if not reference.startswith("#"):
        return None
    pointer = unquote(reference[1:])
    if pointer and not pointer.startswith("/"):
        return _anchored(pointer, document)
    place = document
    for step in pointer.split("/")[1:]:
        name = step.replace("~1", "/").replace("~0", "~")
        if isinstance(place, Mapping) and name in place:
            place = place[name]
        elif isinstance(place, list) and name.isdecimal() and len(name) < 10 and int(name) < len(place):
            place = place[int(name)]
        else:
            return None
    return place


def _anchored(name: str, document: Any) -> Any:
    """The definition with this $anchor."""
    for keyword in DEFINITIONS:
        for schema in _mapping(_mapping(document).get(keyword)).values():
            if _mapping(schema).get("$anchor") == name:
                return schema
    return None


def type_of(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return "null" if value is None else "boolean"
    if isinstance(value, int | float):
        return "integer" if isinstance(value, int) or value.is_integer() else "number"
    return "string" if isinstance(value, str) else "array" if isinstance(value, list) else "object"


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _sequence(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list) else ()
