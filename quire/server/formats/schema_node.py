"""Call readers and grammars share this module, because they must agree on types."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

JSON_TYPES = ("string", "number", "integer", "boolean", "null", "array", "object")
ANY_TYPE = "any"
MAX_NODES = 500
"""Maximum number of schema nodes per value. Beyond it, any type is allowed."""
MAX_DEPTH = 40
"""Maximum depth of combining keywords and references. Beyond it, any type is allowed."""
MAX_VARIANTS = 32
COMBINING_KEYWORDS = frozenset({"$ref", "allOf", "anyOf", "oneOf"})
ANNOTATION_KEYWORDS = frozenset(
    {"title", "description", "default", "examples", "deprecated", "$comment", "$id", "$schema"}
)
DEFINITION_KEYWORDS = frozenset({"$defs", "definitions"})
SCHEMA_MAP_KEYWORDS = frozenset({"properties", "patternProperties", "dependentSchemas"})
VALUE_KEYWORDS = frozenset({"const", "enum", *ANNOTATION_KEYWORDS})
TYPE_BY_KEYWORD = {
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


@dataclass(frozen=True, slots=True)
class TypeVariant:
    """`schema` has $ref, allOf, anyOf and oneOf merged."""

    type: str
    schema: Mapping[str, Any]

    @property
    def numeric_merged_type(self) -> str:
        return "number" if self.type == "integer" else self.type

    @property
    def enum(self) -> list[Any] | None:
        values = self.schema.get("enum")
        return values if isinstance(values, list) else None


@dataclass(frozen=True, slots=True)
class SchemaNode:
    """References in `schema` point into `document`."""

    schema: Any
    document: Any

    @classmethod
    def from_document(cls, schema: Any) -> SchemaNode:
        return cls(schema, schema)

    def variants(self) -> list[TypeVariant]:
        """Never empty: a schema that allows nothing counts as allowing anything."""
        return _VariantResolver(self.document).resolve_variants(self.schema, frozenset())

    def variant_types(self) -> frozenset[str]:
        return frozenset(variant.numeric_merged_type for variant in self.variants())

    def with_schema(self, schema: Any) -> SchemaNode:
        return SchemaNode(schema, self.document)

    def property_node(self, name: str) -> SchemaNode:
        schemas: list[Any] = []
        for schema in self._object_schemas():
            known = _mapping_or_empty(schema.get("properties"))
            if name in known:
                schemas.append(known[name])
                continue
            # Patterns are not matched, because a caller's pattern could take forever.
            rest = [*_mapping_or_empty(schema.get("patternProperties")).values(), schema.get("additionalProperties")]
            schemas += [one for one in rest if isinstance(one, Mapping)]
        return self._any_of_node(schemas)

    def property_entries(self) -> list[tuple[str, SchemaNode, bool]]:
        objects = list(self._object_schemas())
        names = dict.fromkeys(name for schema in objects for name in _mapping_or_empty(schema.get("properties")))
        required = [_list_or_empty(schema.get("required")) for schema in objects]
        entries = [(name, self.property_node(name), all(name in one for one in required)) for name in names]
        return [one for one in entries if one[1].schema is not False]

    def item_node(self, index: int) -> SchemaNode:
        schemas: list[Any] = []
        for variant in self.variants():
            if variant.type in ("array", ANY_TYPE):
                first, rest = _list_or_empty(variant.schema.get("prefixItems")), variant.schema.get("items")
                schemas += [first[index]] if index < len(first) else [rest] if isinstance(rest, Mapping) else []
        return self._any_of_node(schemas)

    def standalone_schema(self) -> Any:
        return _SchemaExtractor(self.document).extract_schema(self.schema)

    def _object_schemas(self) -> Iterator[Mapping[str, Any]]:
        return (variant.schema for variant in self.variants() if variant.type in ("object", ANY_TYPE))

    def _any_of_node(self, schemas: Sequence[Any]) -> SchemaNode:
        distinct = [one for place, one in enumerate(schemas) if one not in schemas[:place]]
        return self.with_schema(distinct[0] if len(distinct) == 1 else {"anyOf": distinct} if distinct else True)


class _VariantResolver:
    def __init__(self, document: Any) -> None:
        self._document = document
        self._nodes_left = MAX_NODES

    def resolve_variants(self, schema: Any, followed: frozenset[str], depth: int = 0) -> list[TypeVariant]:
        self._nodes_left -= 1
        if not isinstance(schema, Mapping) or self._nodes_left < 0 or depth > MAX_DEPTH:
            return [TypeVariant(ANY_TYPE, {})]
        merged_variants = _direct_variants(
            {name: value for name, value in schema.items() if name not in COMBINING_KEYWORDS | DEFINITION_KEYWORDS}
        )
        reference = schema.get("$ref")
        if isinstance(reference, str) and reference not in followed:
            target = resolve_reference(reference, self._document)
            merged_variants = _intersect_variants(
                merged_variants, self.resolve_variants(target, followed | {reference}, depth + 1)
            )
        for member in _list_or_empty(schema.get("allOf")):
            merged_variants = _intersect_variants(merged_variants, self.resolve_variants(member, followed, depth + 1))
        for name in ("anyOf", "oneOf"):
            members = [one for one in _list_or_empty(schema.get(name)) if one is not False]
            if members:
                either = [one for member in members for one in self.resolve_variants(member, followed, depth + 1)]
                merged_variants = _intersect_variants(merged_variants, either)
        return merged_variants


def _direct_variants(schema: Mapping[str, Any]) -> list[TypeVariant]:
    types = schema.get("type")
    names = [one for one in (types if isinstance(types, list) else [types]) if one in JSON_TYPES]
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(values, list) and values:
        if schema.get("nullable") is True and None not in values:
            values = [*values, None]
        groups: dict[str, list[Any]] = {}
        for value in values:
            groups.setdefault(json_type_of_value(value), []).append(value)
        allowed = {
            kind: group for kind, group in groups.items() if not names or any(_common_json_type(kind, n) for n in names)
        }
        return [TypeVariant(kind, {"enum": group}) for kind, group in (allowed or groups).items()]
    if not names:
        implied_types = dict.fromkeys(kind for name, kind in TYPE_BY_KEYWORD.items() if name in schema)
        return [TypeVariant(next(iter(implied_types)) if len(implied_types) == 1 else ANY_TYPE, schema)]
    if schema.get("nullable") is True and "null" not in names:
        names = [*names, "null"]
    return [TypeVariant(name, {"type": "null"} if name == "null" else {**schema, "type": name}) for name in names]


def _intersect_variants(left: Sequence[TypeVariant], right: Sequence[TypeVariant]) -> list[TypeVariant]:
    """Returns the more specific side if the two sides have nothing in common."""
    shared = []
    for one in left:
        for other in right:
            kind = _common_json_type(one.type, other.type)
            if kind:
                shared.append(TypeVariant(kind, _merge_schemas(one.schema, other.schema, kind)))
    if not shared:
        return list(left if any(one.type != ANY_TYPE for one in left) else right)
    if len(shared) > MAX_VARIANTS:
        return [
            TypeVariant(kind, {} if kind == ANY_TYPE else {"type": kind})
            for kind in dict.fromkeys(one.type for one in shared)
        ]
    return shared


def _common_json_type(one: str, other: str) -> str:
    if one == other or other == ANY_TYPE:
        return one
    if one == ANY_TYPE:
        return other
    return "integer" if {one, other} == {"integer", "number"} else ""


def _merge_schemas(one: Mapping[str, Any], other: Mapping[str, Any], kind: str) -> dict[str, Any]:
    merged: dict[str, Any] = {**other, **one}
    for name in one.keys() & other.keys():
        mine, theirs = one[name], other[name]
        if mine == theirs or name in ANNOTATION_KEYWORDS or name == "type":
            continue
        if name == "properties" and isinstance(mine, Mapping) and isinstance(theirs, Mapping):
            shared = {key: {"allOf": [mine[key], theirs[key]]} for key in mine if key in theirs}
            merged[name] = {**mine, **theirs, **shared}
        elif name == "required" and isinstance(mine, list) and isinstance(theirs, list):
            merged[name] = [*mine, *(one for one in theirs if one not in mine)]
        elif name == "enum" and isinstance(mine, list) and isinstance(theirs, list):
            merged[name] = [value for value in mine if value in theirs] or mine
        else:
            merged["allOf"] = [*_list_or_empty(merged.get("allOf")), {name: theirs}]
    if kind != ANY_TYPE and "enum" not in merged:
        merged["type"] = kind
    return merged


class _SchemaExtractor:
    def __init__(self, document: Any) -> None:
        self._document = document
        self._name_by_reference: dict[str, str] = {}
        self._pending_references: list[str] = []

    def extract_schema(self, schema: Any) -> Any:
        extract = self._copy_schema(schema)
        definitions: dict[str, Any] = {}
        while self._pending_references:
            reference = self._pending_references.pop()
            definitions[self._name_by_reference[reference]] = self._copy_schema(
                resolve_reference(reference, self._document)
            )
        return {**extract, "$defs": definitions} if definitions and isinstance(extract, dict) else extract

    def _copy_schema(self, schema: Any) -> Any:
        if not isinstance(schema, Mapping):
            return [self._copy_schema(one) for one in schema] if isinstance(schema, list) else schema
        copy: dict[str, Any] = {}
        for name, value in schema.items():
            if name in DEFINITION_KEYWORDS:
                continue
            if name == "$ref" and isinstance(value, str):
                copy[name] = self._rename_reference(value)
            elif name in SCHEMA_MAP_KEYWORDS and isinstance(value, Mapping):
                copy[name] = {key: self._copy_schema(one) for key, one in value.items()}
            else:
                copy[name] = value if name in VALUE_KEYWORDS else self._copy_schema(value)
        return copy

    def _rename_reference(self, reference: str) -> str:
        if resolve_reference(reference, self._document) is None:
            return reference  # the grammar compiler reports it
        if reference not in self._name_by_reference:
            self._name_by_reference[reference] = f"schema{len(self._name_by_reference)}"
            self._pending_references.append(reference)
        return f"#/$defs/{self._name_by_reference[reference]}"


def resolve_reference(reference: str, document: Any) -> Any:
    if not reference.startswith("#"):
        return None
    pointer = unquote(reference[1:])
    if pointer and not pointer.startswith("/"):
        return _find_anchor(pointer, document)
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


def _find_anchor(name: str, document: Any) -> Any:
    for keyword in DEFINITION_KEYWORDS:
        for schema in _mapping_or_empty(_mapping_or_empty(document).get(keyword)).values():
            if _mapping_or_empty(schema).get("$anchor") == name:
                return schema
    return None


def json_type_of_value(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return "null" if value is None else "boolean"
    if isinstance(value, int | float):
        return "integer" if isinstance(value, int) or value.is_integer() else "number"
    return "string" if isinstance(value, str) else "array" if isinstance(value, list) else "object"


def _mapping_or_empty(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _list_or_empty(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list) else ()
