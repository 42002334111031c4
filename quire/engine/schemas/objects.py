"""What the schemas of one place say of an object, as far as closing it needs to know."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from quire.engine.schemas.keywords import References, Schema

CLOSERS = frozenset({"additionalProperties", "unevaluatedProperties", "patternProperties"})
"""Keywords that say which other properties an object may have."""
_COUNTING = CLOSERS | {"minProperties", "maxProperties", "propertyNames"}
"""Keywords that may turn from true to false, or back, where an object loses properties."""
ANNOTATIONS = frozenset({"title", "description", "default", "examples", "$comment", "deprecated", "readOnly"})
SCALARS = frozenset({"string", "integer", "number", "boolean", "null"})


class Undecided(Exception):
    """The document cannot be closed."""


class Conditions:
    """What `if`, `then`, `else`, `not` and `dependentSchemas` of a place say of the object."""

    def __init__(self, plain: Sequence[dict[str, Any]], references: References) -> None:
        """Raises Unresolvable and Undecided."""
        self._references = references
        self._seen: set[int] = set()
        self.names: dict[str, None] = {}
        """Properties that they speak of."""
        self.properties = False
        """Some of them have `properties`."""
        self.closers = False
        """Some of them say which other properties there may be."""
        self.undecided = False
        """Fewer properties may make a condition true or false."""
        for one in plain:
            self._read_members(one, asserted=True)

    @property
    def count(self) -> int:
        """How many schemas they are made of."""
        return len(self._seen)

    def _read_members(self, schema: dict[str, Any], *, asserted: bool) -> None:
        """`asserted`: the object must be as the members say, and not only be compared with them."""
        for keyword in ("if", "not"):
            self._read(schema.get(keyword), asserted=False)
        for keyword in ("then", "else"):
            self._read(schema.get(keyword), asserted=asserted)
        for keyword in ("dependentSchemas", "dependencies"):
            for name, member in mapping(schema, keyword).items():
                self.names[name] = None
                self._read(member, asserted=asserted)

    def _read(self, schema: Any, *, asserted: bool) -> None:
        if isinstance(schema, list):  # of `dependencies`: names
            self.names |= dict.fromkeys(name for name in schema if isinstance(name, str))
        if not isinstance(schema, dict) or id(schema) in self._seen:
            return
        self._seen.add(id(schema))
        self.names |= dict.fromkeys([*mapping(schema, "properties"), *spoken([schema])])
        self.properties |= asserted and "properties" in schema
        self.closers |= asserted and bool(CLOSERS & schema.keys())
        self.undecided |= bool((_COUNTING & schema.keys()) - (CLOSERS if asserted else frozenset()))
        self._read_members(schema, asserted=asserted)
        for keyword in ("allOf", "anyOf", "oneOf"):
            for one in schemas(schema[keyword]) if keyword in schema else ():
                self._read(one, asserted=asserted)
        if "$ref" in schema:
            self._read(self._references.resolve(schema["$ref"]), asserted=asserted)


def schemas(value: Any) -> list[Schema]:
    if not isinstance(value, list) or not value:
        raise Undecided
    return value


def mapping(schema: dict[str, Any], keyword: str) -> dict[str, Any]:
    value = schema.get(keyword, {})
    if not isinstance(value, dict):
        raise Undecided
    return value


def is_reference(schema: Schema) -> bool:
    """Whether it says nothing but where its content is."""
    return isinstance(schema, dict) and "$ref" in schema and schema.keys() <= {"$ref", *ANNOTATIONS}


def required(plain: Sequence[dict[str, Any]]) -> list[str]:
    names: dict[str, None] = {}
    for one in plain:
        value = one.get("required")
        if isinstance(value, list):
            names |= dict.fromkeys(name for name in value if isinstance(name, str))
    return list(names)


def spoken(plain: Sequence[dict[str, Any]]) -> list[str]:
    """Names of properties that the schemas ask for without describing them."""
    names = required(plain)
    for one in plain:
        for name, others in mapping(one, "dependentRequired").items():
            names += [name, *(other for other in others if isinstance(other, str))] if isinstance(others, list) else []
        enum = one.get("enum")
        for value in (one.get("const"), *(enum if isinstance(enum, list) else ())):
            names += value if isinstance(value, dict) else ()
    return names


def enough(plain: Sequence[dict[str, Any]], written: dict[str, Schema]) -> bool:
    """Whether the named properties suffice for `minProperties`, as far as that is plain."""
    counts = [one["minProperties"] for one in plain if isinstance(one.get("minProperties"), int | float)]
    surely = {
        name
        for name, schema in written.items()
        if schema is True or (isinstance(schema, dict) and schema.keys() <= {"type", *ANNOTATIONS})
    }
    return max(counts, default=0) <= len(surely | {*required(plain)})


def types_of(plain: Sequence[dict[str, Any]]) -> set[str]:
    """The types that a value of all these schemas may have."""
    known = {*SCALARS, "object", "array"}
    found = set(known)
    for one in plain:
        names = set(type_names(one)) or found
        found &= {*names, "integer"} if "number" in names else names
        if not names <= known:
            raise Undecided
    return found


def type_names(schema: dict[str, Any]) -> list[str]:
    """The types that a schema names; [] if it has no `type`. Raises Undecided for what is no type."""
    value = schema.get("type")
    if value is None:
        return []
    names = value if isinstance(value, list) else [value]
    if not all(isinstance(name, str) for name in names):
        raise Undecided
    return names


def mixed(plain: Sequence[dict[str, Any]]) -> bool:
    """Whether some speak of single items of a list, so that an item's place in the list decides what holds for it."""
    return any(name in one for one in plain for name in ("prefixItems", "additionalItems")) or any(
        isinstance(one.get("items"), list) for one in plain
    )


def may_hold_objects(schema: Schema) -> bool:
    """False for schemas of which it is plain that their values are neither objects nor lists."""
    if not isinstance(schema, dict):
        return False
    names = type_names(schema)
    return not names or not SCALARS.issuperset(names)
