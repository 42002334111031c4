"""The keywords of JSON Schema that hold schemas, and references among schemas of one document."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from urllib.parse import unquote

Schema = Any
"""A schema of JSON Schema: an object or a boolean. What callers send may be anything else."""

SINGLE = frozenset(
    {
        *("additionalProperties", "unevaluatedProperties", "propertyNames", "additionalItems", "unevaluatedItems"),
        *("items", "contains", "not", "if", "then", "else", "contentSchema"),
    }
)
"""Keywords whose value is a schema; `items` may also be a list of them."""
LISTS = frozenset({"allOf", "anyOf", "oneOf", "prefixItems", "items"})
MAPS = frozenset({"properties", "patternProperties", "dependentSchemas", "dependencies"})
DEFINITIONS = ("$defs", "definitions")
_PLAIN_NAME = re.compile(r"[^A-Za-z0-9_.-]")


class Unresolvable(Exception):
    """A reference, or an identifier that moves references, which is not followed here."""


def with_children(schema: Mapping[str, Any], change: Callable[[str, Schema], Schema]) -> dict[str, Any]:
    """A copy of the schema, each schema in it replaced by `change(keyword, schema)`; definitions stay as they are."""
    copy: dict[str, Any] = {}
    for keyword, value in schema.items():
        if keyword in MAPS and isinstance(value, dict):
            value = {name: one if isinstance(one, list) else change(keyword, one) for name, one in value.items()}
        elif keyword in LISTS and isinstance(value, list):
            value = [change(keyword, one) for one in value]
        elif keyword in SINGLE:
            value = change(keyword, value)
        copy[keyword] = value
    return copy


def subschemas(schema: Mapping[str, Any]) -> Iterator[tuple[str, Schema]]:
    """Each schema directly in this one, definitions included, with its JSON pointer from here."""
    for keyword, value in schema.items():
        if (keyword in MAPS or keyword in DEFINITIONS) and isinstance(value, dict):
            for name, one in value.items():
                yield f"/{_escaped(keyword)}/{_escaped(name)}", one
        elif keyword in LISTS and isinstance(value, list):
            for index, one in enumerate(value):
                yield f"/{keyword}/{index}", one
        elif keyword in SINGLE:
            yield f"/{keyword}", value


def walk(schema: Schema) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every schema of a document that is an object, with its JSON pointer."""
    waiting = [("", schema)]
    while waiting:
        place, one = waiting.pop()
        if isinstance(one, dict):
            yield place, one
            waiting += [(place + step, child) for step, child in subschemas(one)]


def _escaped(name: str) -> str:
    return str(name).replace("~", "~0").replace("/", "~1")


class References:
    """The schemas of one document, by the references to them."""

    def __init__(self, root: dict[str, Any]) -> None:
        """Raises Unresolvable for identifiers inside the document, relative to which references would be read."""
        self._root = root
        self._base = root.get("$id")
        self._anchors: dict[str, Schema] = {}
        self._places: dict[int, str] = {}
        self.count = 0
        """How many schemas the document has."""
        for place, one in walk(root):
            self.count += 1
            self._places.setdefault(id(one), place)
            if one is not root and isinstance(one.get("$id"), str):
                raise Unresolvable
            if "$dynamicRef" in one or "$recursiveRef" in one:
                raise Unresolvable
            if isinstance(anchor := one.get("$anchor"), str):
                self._anchors[anchor] = one

    def place(self, schema: Schema) -> str:
        """The JSON pointer of a schema of the document."""
        return self._places.get(id(schema), "")

    def resolve(self, reference: Any) -> Schema:
        """Raises Unresolvable."""
        if not isinstance(reference, str):
            raise Unresolvable
        base, mark, fragment = reference.partition("#")
        if base and base != self._base:
            raise Unresolvable
        if not mark or not fragment:
            return self._root
        if not fragment.startswith("/"):
            return self._anchor(fragment)
        found: Any = self._root
        for step in unquote(fragment)[1:].split("/"):
            step = step.replace("~1", "/").replace("~0", "~")
            if isinstance(found, dict) and step in found:
                found = found[step]
            elif isinstance(found, list) and step.isdecimal() and int(step) < len(found):
                found = found[int(step)]
            else:
                raise Unresolvable
        if not isinstance(found, dict | bool):
            raise Unresolvable
        return found

    def _anchor(self, name: str) -> Schema:
        if name not in self._anchors:
            raise Unresolvable
        return self._anchors[name]

    def name(self, schema: Schema) -> str:
        """A plain name for a definition of this schema: the last part of its pointer."""
        last = self.place(schema).rpartition("/")[2]
        return _PLAIN_NAME.sub("_", last)[:64] or "root"
