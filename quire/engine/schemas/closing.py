"""Closes objects of a JSON schema: one that names properties and says nothing of others has no others.

That is what models' makers, OpenAI's strict mode and other servers mean by such a schema, and what Pydantic's users
expect; by the letter of JSON Schema any other property would be allowed.

An object is closed over all that is said of one place: what `$ref` and `allOf` lead to, one branch of each `anyOf` and
`oneOf`, and what `then`, `else` and `dependentSchemas` add. Each of these members alone would forbid the properties of
the others. So the schemas of one place are merged first, properties of the same name too, and alternatives are
multiplied out. What is said under `not` and `if` stays as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from quire.engine.schemas.keywords import DEFINITIONS, References, Schema, Unresolvable, with_children
from quire.engine.schemas.objects import (
    ANNOTATIONS,
    CLOSERS,
    Conditions,
    Undecided,
    enough,
    is_reference,
    mapping,
    may_hold_objects,
    mixed,
    required,
    schemas,
    spoken,
    types_of,
)

_OF_LISTS = frozenset({"items", "prefixItems", "additionalItems"})
_COUPLED = (
    _OF_LISTS | {"unevaluatedItems"},
    frozenset({"contains", "minContains", "maxContains"}),
    frozenset({"if", "then", "else"}),
)
"""Keywords that mean something else beside each other, so that they move together."""
_STEPS_PER_SCHEMA, _LEAST_STEPS = 16, 256
"""Merged schemas, and properties in them, that are written for each schema of the document. More come from alternatives
that multiply."""


class Closed(NamedTuple):
    schema: Schema
    open: tuple[str, ...]
    """JSON pointers of objects that stay open, as it could not be decided what they are merged of."""


@dataclass(frozen=True, slots=True)
class _Merged:
    """The schemas of one place."""

    plain: list[dict[str, Any]] = field(default_factory=list)
    """Schemas without `$ref`, `allOf`, `anyOf` and `oneOf`, which all hold."""
    choices: list[tuple[str, list[Schema]]] = field(default_factory=list)
    """`anyOf` or `oneOf`, and its branches."""
    wanted: set[str] = field(default_factory=set)
    """"ref": a reference was followed, "again": a schema was met twice, "never": `false` is among the schemas."""


def closed(schema: Schema, *, by_name: bool = False) -> Closed:
    """The schema with its objects closed. `by_name`: the first level has all its properties in `properties`, also those
    that stand beside alternatives."""
    if not isinstance(schema, dict):
        return Closed(schema, ())
    try:
        return _Closing(schema).run(by_name=by_name)
    except (Unresolvable, Undecided, RecursionError):
        return Closed(schema, ("",))


class _Closing:
    """Closes one document."""

    def __init__(self, root: dict[str, Any]) -> None:
        self._root = root
        self._references = References(root)
        self._steps = _LEAST_STEPS + _STEPS_PER_SCHEMA * self._references.count
        self._definitions: dict[str, Schema] = {}
        self._names: dict[tuple[object, ...], str] = {}
        self._taken: set[str] = set()
        self._waiting: list[tuple[str, Callable[[], Schema]]] = []
        """Definitions to be written: what refers to them is written already."""
        self._own: dict[int, tuple[dict[str, Any], Schema]] = {}
        """By a schema's id: the schema without what it leads to, and the schema of the document."""
        self._wrapped: dict[int, dict[str, Any]] = {}
        """By the id of its branches: a schema that is one choice."""
        self._open: dict[str, None] = {}

    def run(self, *, by_name: bool) -> Closed:
        parts = self._parts((self._root,))
        result = self._merge(parts)
        if by_name and parts.choices and isinstance(result, dict):
            result = {**self._beside(parts), **result}
        while self._waiting:
            name, write = self._waiting.pop(0)
            self._definitions[name] = write()
        if isinstance(result, dict):
            kept = {name: self._root[name] for name in ("$schema", "$id", "x-guidance") if name in self._root}
            result = {**kept, **result}
            if self._definitions:
                result["$defs"] = self._definitions
        return Closed(result, tuple(self._open))

    def _place(self, schemas: tuple[Schema, ...]) -> Schema:
        """All that holds at one place, as one schema."""
        if len(schemas) == 1 and is_reference(schemas[0]):
            target = self._references.resolve(schemas[0]["$ref"])
            if isinstance(target, bool):
                return target
            return self._named((id(target),), target, lambda: self._merge(self._parts((target,))))
        parts = self._parts(schemas)
        if "ref" not in parts.wanted or "never" in parts.wanted:
            return self._merge(parts)
        key = (*(id(one) for one in parts.plain), *(id(branches) for _, branches in parts.choices))
        first = next((one for one in schemas if isinstance(one, dict)), {})
        return self._named(key, first, lambda: self._merge(parts))

    def _named(self, key: tuple[object, ...], schema: Schema, write: Callable[[], Schema]) -> Schema:
        """A reference to a definition, which is written once, so that recursion ends."""
        if key not in self._names:
            hint = self._references.name(schema)
            name, number = hint, 2
            while name in self._taken:
                name, number = f"{hint}_{number}", number + 1
            self._names[key] = name
            self._taken.add(name)
            self._waiting.append((name, write))
        return {"$ref": f"#/$defs/{self._names[key]}"}

    def _parts(self, schemas: Iterable[Schema]) -> _Merged:
        parts, seen = _Merged(), set[int]()
        for schema in schemas:
            self._add(schema, parts, seen)
        return parts

    def _add(self, schema: Schema, parts: _Merged, seen: set[int]) -> None:
        if schema is False:
            parts.wanted.add("never")
        if id(schema) in seen:
            parts.wanted.add("again")
        if isinstance(schema, bool) or id(schema) in seen:
            return
        if not isinstance(schema, dict):
            raise Undecided
        seen.add(id(schema))
        self._spend(1)
        own = self._without_applicators(schema)
        if "properties" not in own:  # properties come in the order in which the text names them
            self._add_plain(own, parts)
        for keyword, value in schema.items():
            if keyword == "properties":
                self._add_plain(own, parts)
            elif keyword == "$ref":
                parts.wanted.add("ref")
                self._add(self._references.resolve(value), parts, seen)
            elif keyword == "allOf":
                for one in schemas(value):
                    self._add(one, parts, seen)
            elif keyword in ("anyOf", "oneOf"):
                branches = schemas(value)
                if all(branches is not known for _, known in parts.choices):
                    parts.choices.append((keyword, branches))

    @staticmethod
    def _add_plain(own: dict[str, Any], parts: _Merged) -> None:
        if own and all(own is not one for one in parts.plain):
            parts.plain.append(own)

    def _without_applicators(self, schema: dict[str, Any]) -> dict[str, Any]:
        """The same object each time, and of itself itself: places are known by the ids of what holds there."""
        if id(schema) not in self._own:
            left_out = {"$ref", "allOf", "anyOf", "oneOf", "$schema", "$id", "$anchor", "x-guidance", *DEFINITIONS}
            own = schema
            if left_out & schema.keys():
                own = {name: value for name, value in schema.items() if name not in left_out}
            self._own[id(schema)] = self._own[id(own)] = own, schema
        return self._own[id(schema)][0]

    def _choice(self, keyword: str, branches: list[Schema]) -> dict[str, Any]:
        if id(branches) not in self._wrapped:
            self._wrapped[id(branches)] = {keyword: branches}
        return self._wrapped[id(branches)]

    def _merge(self, parts: _Merged) -> Schema:
        self._spend(1)
        if "never" in parts.wanted:
            return False
        if "again" in parts.wanted and not parts.plain and not parts.choices:
            raise Undecided  # a schema that is nothing but itself
        if not parts.choices:
            return self._object(parts.plain)
        (keyword, branches), *others = parts.choices
        rest = [self._choice(*one) for one in others]
        written = [self._place((*parts.plain, branch, *rest)) for branch in branches]
        return {keyword: [one for one in written if one is not False] or [False]}

    def _object(self, plain: list[dict[str, Any]]) -> Schema:
        """The merged schema of a place without alternatives; False where no value has all their types."""
        if not types_of(plain):
            return False
        conditional = Conditions(plain, self._references)
        self._spend(conditional.count)
        values = self._values(plain)
        self._spend(len(values))
        patterns = [value for one in plain for value in mapping(one, "patternProperties").values()]
        patterned = any(map(may_hold_objects, patterns))
        written: dict[str, Schema] = {}
        for name, several in values.items():
            if (patterned or name in conditional.names) and any(map(may_hold_objects, several)):
                self._note(several)
                written[name] = self._as_it_is({"allOf": list(several)} if len(several) > 1 else several[0])
            else:
                written[name] = self._place(several)
        result = self._joined(plain, written)
        if not any("properties" in one for one in plain) and not conditional.properties:
            return result
        if any(CLOSERS & one.keys() for one in plain) or conditional.closers:
            return result
        allowed = dict.fromkeys([*written, *spoken(plain), *conditional.names])
        if conditional.undecided or not enough(plain, written):
            self._note(plain)
            return result
        properties = {name: written.get(name, True) for name in allowed}
        return {**result, "properties": properties, "additionalProperties": False}

    def _values(self, plain: Sequence[dict[str, Any]]) -> dict[str, tuple[Schema, ...]]:
        """Of each named property: all schemas that hold for its value."""
        found: dict[str, list[Schema]] = {}
        for one in plain:
            for name, value in mapping(one, "properties").items():
                found.setdefault(name, []).append(value)
        for one in plain:  # what a member says of all its other properties holds for those that another member names
            more, own = one.get("additionalProperties"), mapping(one, "properties")
            if isinstance(more, dict) and "patternProperties" not in one:
                others = found.keys() - own.keys()
                self._spend(len(others))
                for name in others:
                    found[name].append(more)
        return {name: tuple(values) for name, values in found.items()}

    def _joined(self, plain: Sequence[dict[str, Any]], written: dict[str, Schema]) -> dict[str, Any]:
        """One schema of several: keywords side by side, and under `allOf` what several of them say otherwise."""
        if len(plain) == 1:
            return self._inside(plain[0], written)
        result: dict[str, Any] = {}
        members: list[dict[str, Any]] = []
        of_lists = sum(bool(_OF_LISTS & one.keys()) for one in plain)
        items = self._items(plain)
        elsewhere = {"properties"} if items is None else {"properties", "items"}
        for one in plain:
            kept = one if CLOSERS & one.keys() else {name: one[name] for name in one if name not in elsewhere}
            others = written.keys() - mapping(one, "properties").keys()
            inside = self._inside(kept, {}, rest=not others, lists=of_lists < 2)
            if CLOSERS & one.keys():
                members.append(inside)
                continue
            conflict = {name for name in inside.keys() & result.keys() if result[name] != inside[name]}
            for coupled in _COUPLED:
                if coupled & inside.keys() & conflict:
                    conflict |= coupled & inside.keys()
            conflict -= {*ANNOTATIONS, "required"}
            result = {**{name: value for name, value in inside.items() if name not in conflict}, **result}
            if conflict:
                members.append({name: value for name, value in inside.items() if name in conflict})
        if any("properties" in one for one in plain):
            result["properties"] = written
        if names := required(plain):
            result["required"] = names
        if items is not None:
            result["items"] = items
        return {**result, "allOf": members} if members else result

    def _items(self, plain: Sequence[dict[str, Any]]) -> Schema | None:
        """The schema of a list's items where several schemas have one."""
        found = [one["items"] for one in plain if "items" in one]
        return self._place(tuple(found)) if len(found) > 1 and not mixed(plain) else None

    def _inside(
        self, schema: dict[str, Any], written: dict[str, Schema], *, rest: bool = True, lists: bool = True
    ) -> dict[str, Any]:
        """A schema with what it holds closed; its properties are `written`. `rest`: no other schema names properties
        that are the rest for this one. `lists`: no other schema speaks of the same items."""
        patterns = mapping(schema, "patternProperties")
        clear = not patterns or (rest and len(patterns) == 1 and not mapping(schema, "properties"))

        def change(keyword: str, value: Schema) -> Schema:
            if keyword == "properties":
                return True
            if (
                (keyword == "patternProperties" and clear)
                or (keyword == "additionalProperties" and rest)
                or (keyword in _OF_LISTS and lists)
            ):
                return self._place((value,))
            if keyword in ("patternProperties", "additionalProperties", *_OF_LISTS) and may_hold_objects(value):
                self._note([schema])
            return self._as_it_is(value)

        inside = with_children(schema, change)
        if isinstance(schema.get("properties"), dict):
            inside["properties"] = {name: written.get(name, True) for name in schema["properties"]}
        return inside

    def _as_it_is(self, schema: Schema) -> Schema:
        """The schema by its letter, its references leading to definitions by their letter."""
        if not isinstance(schema, dict):
            return schema
        self._spend(1)
        copy = with_children(schema, lambda _, value: self._as_it_is(value))
        for name in DEFINITIONS:
            copy.pop(name, None)
        if "$ref" in copy:
            target = self._references.resolve(copy["$ref"])
            copy["$ref"] = self._named(("letter", id(target)), target, lambda: self._as_it_is(target))["$ref"]
        return copy

    def _beside(self, parts: _Merged) -> dict[str, Any]:
        """The first level of what stands beside alternatives: its properties, of any value, as the alternatives hold
        them, and which are required."""
        values = self._values(parts.plain)
        needed = [name for name in required(parts.plain) if name in values]
        alone = {name: schemas for name, schemas in values.items() if not any(map(may_hold_objects, schemas))}
        properties = {name: self._place(alone[name]) if name in alone else True for name in values}
        return {"type": "object", "properties": properties, "required": needed} if values else {}

    def _note(self, schemas: Sequence[Schema]) -> None:
        """Note the place of an object that stays open."""
        known = [self._own[id(one)][1] if id(one) in self._own else one for one in schemas]
        self._open[next((place for one in known if (place := self._references.place(one))), "")] = None

    def _spend(self, steps: int) -> None:
        self._steps -= steps
        if self._steps < 0:
            raise Undecided
