from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from urllib.parse import unquote

Schema = Any
"""A schema is an object or a boolean, but callers may send anything else."""

SCHEMA_KEYWORDS = frozenset(
    {
        "additionalProperties",
        "unevaluatedProperties",
        "propertyNames",
        "additionalItems",
        "unevaluatedItems",
        "items",
        "contains",
        "not",
        "if",
        "then",
        "else",
        "contentSchema",
    }
)
SCHEMA_LIST_KEYWORDS = frozenset({"allOf", "anyOf", "oneOf", "prefixItems", "items"})
SCHEMA_MAP_KEYWORDS = frozenset({"properties", "patternProperties", "dependentSchemas", "dependencies"})
DEFINITION_KEYWORDS = ("$defs", "definitions")
_NON_NAME_CHARACTERS = re.compile(r"[^A-Za-z0-9_.-]")


class UnresolvableReference(Exception):
    """The schema has a reference that is not followed here, or an $id, which changes what references mean."""


def map_subschemas(schema: Mapping[str, Any], change: Callable[[str, Schema], Schema]) -> dict[str, Any]:
    """Each subschema becomes change(keyword, subschema). Definitions stay."""
    copy: dict[str, Any] = {}
    for keyword, value in schema.items():
        if keyword in SCHEMA_MAP_KEYWORDS and isinstance(value, dict):
            value = {name: one if isinstance(one, list) else change(keyword, one) for name, one in value.items()}
        elif keyword in SCHEMA_LIST_KEYWORDS and isinstance(value, list):
            value = [change(keyword, one) for one in value]
        elif keyword in SCHEMA_KEYWORDS:
            value = change(keyword, value)
        copy[keyword] = value
    return copy


def subschemas(schema: Mapping[str, Any]) -> Iterator[tuple[str, Schema]]:
    """Yield (relative JSON pointer, direct subschema), also for definitions."""
    for keyword, value in schema.items():
        if (keyword in SCHEMA_MAP_KEYWORDS or keyword in DEFINITION_KEYWORDS) and isinstance(value, dict):
            for name, one in value.items():
                yield f"/{_escape_pointer(keyword)}/{_escape_pointer(name)}", one
        elif keyword in SCHEMA_LIST_KEYWORDS and isinstance(value, list):
            for index, one in enumerate(value):
                yield f"/{keyword}/{index}", one
        elif keyword in SCHEMA_KEYWORDS:
            yield f"/{keyword}", value


def walk_schemas(schema: Schema) -> Iterator[tuple[str, dict[str, Any]]]:
    pending = [("", schema)]
    while pending:
        place, one = pending.pop()
        if isinstance(one, dict):
            yield place, one
            pending += [(place + step, child) for step, child in subschemas(one)]


def _escape_pointer(name: str) -> str:
    return str(name).replace("~", "~0").replace("/", "~1")


class SchemaReferences:
    def __init__(self, root: dict[str, Any]) -> None:
        """Raises UnresolvableReference for an inner $id."""
        self._root = root
        self._base_id = root.get("$id")
        self._anchors: dict[str, Schema] = {}
        self._pointers: dict[int, str] = {}
        self.num_schemas = 0
        for place, one in walk_schemas(root):
            self.num_schemas += 1
            self._pointers.setdefault(id(one), place)
            if one is not root and isinstance(one.get("$id"), str):
                raise UnresolvableReference
            if "$dynamicRef" in one or "$recursiveRef" in one:
                raise UnresolvableReference
            if isinstance(anchor := one.get("$anchor"), str):
                self._anchors[anchor] = one

    def pointer_of_schema(self, schema: Schema) -> str:
        return self._pointers.get(id(schema), "")

    def resolve(self, reference: Any) -> Schema:
        """Raises UnresolvableReference."""
        if not isinstance(reference, str):
            raise UnresolvableReference
        base, mark, fragment = reference.partition("#")
        if base and base != self._base_id:
            raise UnresolvableReference
        if not mark or not fragment:
            return self._root
        if not fragment.startswith("/"):
            return self._resolve_anchor(fragment)
        target: Any = self._root
        for step in unquote(fragment)[1:].split("/"):
            step = step.replace("~1", "/").replace("~0", "~")
            if isinstance(target, dict) and step in target:
                target = target[step]
            elif isinstance(target, list) and step.isdecimal() and int(step) < len(target):
                target = target[int(step)]
            else:
                raise UnresolvableReference
        if not isinstance(target, dict | bool):
            raise UnresolvableReference
        return target

    def _resolve_anchor(self, name: str) -> Schema:
        if name not in self._anchors:
            raise UnresolvableReference
        return self._anchors[name]

    def suggest_definition_name(self, schema: Schema) -> str:
        last = self.pointer_of_schema(schema).rpartition("/")[2]
        return _NON_NAME_CHARACTERS.sub("_", last)[:64] or "root"
