"""Closes objects: if a schema names properties and has no keyword for other properties, it is changed to forbid them.
OpenAI's strict mode, other servers and Pydantic users expect that, although JSON Schema allows others.

All schemas that apply to an object are closed together: targets of `$ref` and `allOf`, one branch of each `anyOf` and
`oneOf`, additions of `then`, `else` and `dependentSchemas`. Closed separately, each would forbid the properties of the
others, so they are merged first. `not` and `if` are left alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from quire.engine.schemas.keywords import (
    DEFINITION_KEYWORDS,
    Schema,
    SchemaReferences,
    UnresolvableReference,
    map_subschemas,
)
from quire.engine.schemas.object_keywords import (
    ANNOTATION_KEYWORDS,
    CLOSING_KEYWORDS,
    ConditionalKeywords,
    UndecidableSchema,
    common_types,
    has_positional_items,
    is_bare_reference,
    may_hold_objects,
    named_properties_reach_minimum,
    names_in_required_and_constants,
    require_schema_list,
    require_schema_map,
    required_names,
)

_ITEM_KEYWORDS = frozenset({"items", "prefixItems", "additionalItems"})
_COUPLED_KEYWORDS = (
    _ITEM_KEYWORDS | {"unevaluatedItems"},
    frozenset({"contains", "minContains", "maxContains"}),
    frozenset({"if", "then", "else"}),
)
"""Keywords of a set depend on each other, so they stay together."""
_STEPS_PER_SCHEMA, _MIN_STEPS = 16, 256
"""Merging and copying may take _MIN_STEPS steps, plus _STEPS_PER_SCHEMA for each schema in the document. They are
limited because alternatives multiply.
"""


class ClosedSchema(NamedTuple):
    schema: Schema
    open_objects: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _ApplicableSchemas:
    plain_schemas: list[dict[str, Any]] = field(default_factory=list)
    choices: list[tuple[str, list[Schema]]] = field(default_factory=list)
    markers: set[str] = field(default_factory=set)
    """"ref": a reference was followed. "again": a schema was met twice. "never": a schema is `false`."""


def close_objects(schema: Schema, *, by_name: bool = False) -> ClosedSchema:
    """Returns undecidable schemas unchanged. If `by_name`, the first level lists all properties, even if alternatives
    list them too.
    """
    if not isinstance(schema, dict):
        return ClosedSchema(schema, ())
    try:
        return _SchemaCloser(schema).close_root(by_name=by_name)
    except (UnresolvableReference, UndecidableSchema, RecursionError):
        return ClosedSchema(schema, ("",))


class _SchemaCloser:
    def __init__(self, root: dict[str, Any]) -> None:
        self._root = root
        self._references = SchemaReferences(root)
        self._steps_left = _MIN_STEPS + _STEPS_PER_SCHEMA * self._references.num_schemas
        self._definitions: dict[str, Schema] = {}
        self._names_by_key: dict[tuple[object, ...], str] = {}
        self._used_names: set[str] = set()
        self._pending_definitions: list[tuple[str, Callable[[], Schema]]] = []
        self._own_keywords: dict[int, tuple[dict[str, Any], Schema]] = {}
        """(schema without applicators, original schema), keyed by the id of either."""
        self._choice_schemas: dict[int, dict[str, Any]] = {}
        self._open_pointers: dict[str, None] = {}

    def close_root(self, *, by_name: bool) -> ClosedSchema:
        parts = self._collect_applicable((self._root,))
        result = self._merge_applicable(parts)
        if by_name and parts.choices and isinstance(result, dict):
            result = {**self._top_level_object_schema(parts), **result}
        while self._pending_definitions:
            name, write = self._pending_definitions.pop(0)
            self._definitions[name] = write()
        if isinstance(result, dict):
            root_keywords = {name: self._root[name] for name in ("$schema", "$id", "x-guidance") if name in self._root}
            result = {**root_keywords, **result}
            if self._definitions:
                result["$defs"] = self._definitions
        return ClosedSchema(result, tuple(self._open_pointers))

    def _merge_and_close(self, schemas: tuple[Schema, ...]) -> Schema:
        if len(schemas) == 1 and is_bare_reference(schemas[0]):
            target = self._references.resolve(schemas[0]["$ref"])
            if isinstance(target, bool):
                return target
            return self._definition_reference(
                (id(target),), target, lambda: self._merge_applicable(self._collect_applicable((target,)))
            )
        parts = self._collect_applicable(schemas)
        if "ref" not in parts.markers or "never" in parts.markers:
            return self._merge_applicable(parts)
        key = (*(id(one) for one in parts.plain_schemas), *(id(branches) for _, branches in parts.choices))
        first = next((one for one in schemas if isinstance(one, dict)), {})
        return self._definition_reference(key, first, lambda: self._merge_applicable(parts))

    def _definition_reference(self, key: tuple[object, ...], schema: Schema, write: Callable[[], Schema]) -> Schema:
        """Writes each definition only once, so that recursion ends."""
        if key not in self._names_by_key:
            hint = self._references.suggest_definition_name(schema)
            name, number = hint, 2
            while name in self._used_names:
                name, number = f"{hint}_{number}", number + 1
            self._names_by_key[key] = name
            self._used_names.add(name)
            self._pending_definitions.append((name, write))
        return {"$ref": f"#/$defs/{self._names_by_key[key]}"}

    def _collect_applicable(self, schemas: Iterable[Schema]) -> _ApplicableSchemas:
        parts, seen = _ApplicableSchemas(), set[int]()
        for schema in schemas:
            self._add_schema(schema, parts, seen)
        return parts

    def _add_schema(self, schema: Schema, parts: _ApplicableSchemas, seen: set[int]) -> None:
        if schema is False:
            parts.markers.add("never")
        if id(schema) in seen:
            parts.markers.add("again")
        if isinstance(schema, bool) or id(schema) in seen:
            return
        if not isinstance(schema, dict):
            raise UndecidableSchema
        seen.add(id(schema))
        self._spend_steps(1)
        own_keywords = self._without_applicators(schema)
        if "properties" not in own_keywords:  # otherwise added below, in the document's order
            self._add_plain_schema(own_keywords, parts)
        for keyword, value in schema.items():
            if keyword == "properties":
                self._add_plain_schema(own_keywords, parts)
            else:
                self._add_applicator(keyword, value, parts, seen)

    def _add_applicator(self, keyword: str, value: Any, parts: _ApplicableSchemas, seen: set[int]) -> None:
        if keyword == "$ref":
            parts.markers.add("ref")
            self._add_schema(self._references.resolve(value), parts, seen)
        elif keyword == "allOf":
            for one in require_schema_list(value):
                self._add_schema(one, parts, seen)
        elif keyword in ("anyOf", "oneOf"):
            branches = require_schema_list(value)
            if all(branches is not known for _, known in parts.choices):
                parts.choices.append((keyword, branches))

    @staticmethod
    def _add_plain_schema(own_keywords: dict[str, Any], parts: _ApplicableSchemas) -> None:
        if own_keywords and all(own_keywords is not one for one in parts.plain_schemas):
            parts.plain_schemas.append(own_keywords)

    def _without_applicators(self, schema: dict[str, Any]) -> dict[str, Any]:
        """Always returns the same object, because schemas are identified by id."""
        if id(schema) not in self._own_keywords:
            left_out = {
                "$ref",
                "allOf",
                "anyOf",
                "oneOf",
                "$schema",
                "$id",
                "$anchor",
                "x-guidance",
                *DEFINITION_KEYWORDS,
            }
            own_keywords = schema
            if left_out & schema.keys():
                own_keywords = {name: value for name, value in schema.items() if name not in left_out}
            self._own_keywords[id(schema)] = self._own_keywords[id(own_keywords)] = own_keywords, schema
        return self._own_keywords[id(schema)][0]

    def _cached_choice_schema(self, keyword: str, branches: list[Schema]) -> dict[str, Any]:
        if id(branches) not in self._choice_schemas:
            self._choice_schemas[id(branches)] = {keyword: branches}
        return self._choice_schemas[id(branches)]

    def _merge_applicable(self, parts: _ApplicableSchemas) -> Schema:
        self._spend_steps(1)
        if "never" in parts.markers:
            return False
        if "again" in parts.markers and not parts.plain_schemas and not parts.choices:
            raise UndecidableSchema  # the schema refers only to itself
        if not parts.choices:
            return self._merge_object(parts.plain_schemas)
        (keyword, branches), *others = parts.choices
        rest = [self._cached_choice_schema(*one) for one in others]
        written = [self._merge_and_close((*parts.plain_schemas, branch, *rest)) for branch in branches]
        return {keyword: [one for one in written if one is not False] or [False]}

    def _merge_object(self, schemas: list[dict[str, Any]]) -> Schema:
        """The schemas must have no alternatives. Returns False if their types are disjoint."""
        if not common_types(schemas):
            return False
        conditional = ConditionalKeywords(schemas, self._references)
        self._spend_steps(conditional.num_schemas)
        values = self._property_schemas(schemas)
        self._spend_steps(len(values))
        patterns = [value for one in schemas for value in require_schema_map(one, "patternProperties").values()]
        patterned = any(map(may_hold_objects, patterns))
        written: dict[str, Schema] = {}
        for name, several in values.items():
            if (patterned or name in conditional.property_names) and any(map(may_hold_objects, several)):
                self._record_open_object(several)
                written[name] = self._copy_unclosed({"allOf": list(several)} if len(several) > 1 else several[0])
            else:
                written[name] = self._merge_and_close(several)
        result = self._merge_keywords(schemas, written)
        if not any("properties" in one for one in schemas) and not conditional.has_properties:
            return result
        if any(CLOSING_KEYWORDS & one.keys() for one in schemas) or conditional.has_closers:
            return result
        allowed = dict.fromkeys([*written, *names_in_required_and_constants(schemas), *conditional.property_names])
        if conditional.is_undecidable or not named_properties_reach_minimum(schemas, written):
            self._record_open_object(schemas)
            return result
        properties = {name: written.get(name, True) for name in allowed}
        return {**result, "properties": properties, "additionalProperties": False}

    def _property_schemas(self, schemas: Sequence[dict[str, Any]]) -> dict[str, tuple[Schema, ...]]:
        schemas_by_name: dict[str, list[Schema]] = {}
        for one in schemas:
            for name, value in require_schema_map(one, "properties").items():
                schemas_by_name.setdefault(name, []).append(value)
        for one in schemas:  # additionalProperties applies to the properties that the other schemas name
            more, own = one.get("additionalProperties"), require_schema_map(one, "properties")
            if isinstance(more, dict) and "patternProperties" not in one:
                others = schemas_by_name.keys() - own.keys()
                self._spend_steps(len(others))
                for name in others:
                    schemas_by_name[name].append(more)
        return {name: tuple(values) for name, values in schemas_by_name.items()}

    def _merge_keywords(self, schemas: Sequence[dict[str, Any]], written: dict[str, Schema]) -> dict[str, Any]:
        """Conflicting keywords are put under `allOf`."""
        if len(schemas) == 1:
            return self._close_children(schemas[0], written)
        result: dict[str, Any] = {}
        members: list[dict[str, Any]] = []
        of_lists = sum(bool(_ITEM_KEYWORDS & one.keys()) for one in schemas)
        items = self._merge_items(schemas)
        elsewhere = {"properties"} if items is None else {"properties", "items"}
        for one in schemas:
            own_part = (
                one if CLOSING_KEYWORDS & one.keys() else {name: one[name] for name in one if name not in elsewhere}
            )
            others = written.keys() - require_schema_map(one, "properties").keys()
            inside = self._close_children(own_part, {}, rest=not others, lists=of_lists < 2)
            if CLOSING_KEYWORDS & one.keys():
                members.append(inside)
                continue
            conflict = {name for name in inside.keys() & result.keys() if result[name] != inside[name]}
            for coupled in _COUPLED_KEYWORDS:
                if coupled & inside.keys() & conflict:
                    conflict |= coupled & inside.keys()
            conflict -= {*ANNOTATION_KEYWORDS, "required"}
            result = {**{name: value for name, value in inside.items() if name not in conflict}, **result}
            if conflict:
                members.append({name: value for name, value in inside.items() if name in conflict})
        if any("properties" in one for one in schemas):
            result["properties"] = written
        if names := required_names(schemas):
            result["required"] = names
        if items is not None:
            result["items"] = items
        return {**result, "allOf": members} if members else result

    def _merge_items(self, schemas: Sequence[dict[str, Any]]) -> Schema | None:
        item_schemas = [one["items"] for one in schemas if "items" in one]
        return (
            self._merge_and_close(tuple(item_schemas))
            if len(item_schemas) > 1 and not has_positional_items(schemas)
            else None
        )

    def _close_children(
        self, schema: dict[str, Any], written: dict[str, Schema], *, rest: bool = True, lists: bool = True
    ) -> dict[str, Any]:
        """`rest`: no other schema names properties that this one lacks, so that schemas for unnamed properties can be
        closed. `lists`: no other schema has keywords for items.
        """
        patterns = require_schema_map(schema, "patternProperties")
        clear = not patterns or (rest and len(patterns) == 1 and not require_schema_map(schema, "properties"))

        def close_child(keyword: str, value: Schema) -> Schema:
            if keyword == "properties":
                return True
            if (
                (keyword == "patternProperties" and clear)
                or (keyword == "additionalProperties" and rest)
                or (keyword in _ITEM_KEYWORDS and lists)
            ):
                return self._merge_and_close((value,))
            if keyword in ("patternProperties", "additionalProperties", *_ITEM_KEYWORDS) and may_hold_objects(value):
                self._record_open_object([schema])
            return self._copy_unclosed(value)

        inside = map_subschemas(schema, close_child)
        if isinstance(schema.get("properties"), dict):
            inside["properties"] = {name: written.get(name, True) for name in schema["properties"]}
        return inside

    def _copy_unclosed(self, schema: Schema) -> Schema:
        if not isinstance(schema, dict):
            return schema
        self._spend_steps(1)
        copy = map_subschemas(schema, lambda _, value: self._copy_unclosed(value))
        for name in DEFINITION_KEYWORDS:
            copy.pop(name, None)
        if "$ref" in copy:
            target = self._references.resolve(copy["$ref"])
            copy["$ref"] = self._definition_reference(
                ("letter", id(target)), target, lambda: self._copy_unclosed(target)
            )["$ref"]
        return copy

    def _top_level_object_schema(self, parts: _ApplicableSchemas) -> dict[str, Any]:
        """Properties that may be objects or lists get the schema `true`, because the alternatives, which apply too,
        describe them.
        """
        values = self._property_schemas(parts.plain_schemas)
        needed = [name for name in required_names(parts.plain_schemas) if name in values]
        alone = {name: schemas for name, schemas in values.items() if not any(map(may_hold_objects, schemas))}
        properties = {name: self._merge_and_close(alone[name]) if name in alone else True for name in values}
        return {"type": "object", "properties": properties, "required": needed} if values else {}

    def _record_open_object(self, schemas: Sequence[Schema]) -> None:
        known = [self._own_keywords[id(one)][1] if id(one) in self._own_keywords else one for one in schemas]
        self._open_pointers[
            next((place for one in known if (place := self._references.pointer_of_schema(one))), "")
        ] = None

    def _spend_steps(self, steps: int) -> None:
        self._steps_left -= steps
        if self._steps_left < 0:
            raise UndecidableSchema
