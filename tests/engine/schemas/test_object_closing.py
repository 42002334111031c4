"""Tests which properties `close_objects` allows in objects of schemas that lack additionalProperties."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from quire.engine.schemas.object_closing import close_objects
from tests.tiers import examples

INTEGER = {"type": "integer"}
NODE = {"type": "object", "properties": {"v": INTEGER, "next": {"$ref": "#/$defs/Node"}}, "required": ["v"]}
PETS = {
    "Cat": {"type": "object", "properties": {"kind": {"const": "cat"}, "lives": INTEGER}, "required": ["kind"]},
    "Dog": {"type": "object", "properties": {"kind": {"const": "dog"}, "age": INTEGER}, "required": ["kind"]},
}


def object_with(*names: str, **more: Any) -> dict[str, Any]:
    """A schema of an object with these properties, all of them integers."""
    return {"type": "object", "properties": dict.fromkeys(names, INTEGER), **more}


TABLE: dict[str, tuple[Any, list[Any], list[Any]]] = {
    "properties": (object_with("a"), [{}, {"a": 1}], [{"a": 1, "b": 2}]),
    "properties, true": (object_with("a", additionalProperties=True), [{"a": 1, "b": 2}], []),
    "properties, false": (object_with("a", additionalProperties=False), [{"a": 1}], [{"b": 2}]),
    "properties, a schema": (object_with("a", additionalProperties=INTEGER), [{"b": 2}], [{"b": "x"}]),
    "properties, unevaluatedProperties": (object_with("a", unevaluatedProperties=True), [{"b": 2}], []),
    "properties, patterns": (
        object_with("a", patternProperties={"^x-": INTEGER}),
        [{"x-b": 2, "c": "any"}],
        [{"x-b": "2"}],
    ),
    "no properties": ({"type": "object"}, [{"b": 2}], [[]]),
    "dict of": ({"type": "object", "additionalProperties": INTEGER}, [{"b": 2}], [{"b": "x"}]),
    "empty properties": ({"type": "object", "properties": {}}, [{}], [{"b": 2}]),
    "required is allowed": (object_with("a", required=["z"]), [{"z": "any"}], [{"z": 1, "b": 2}]),
    "dependentRequired is allowed": (object_with("a", dependentRequired={"a": ["z"]}), [{"a": 1, "z": 2}], [{"b": 2}]),
    "const is allowed": ({"properties": {"a": INTEGER}, "const": {"a": 1, "b": 2}}, [{"a": 1, "b": 2}], []),
    "no type": ({"properties": {"a": INTEGER}}, [{"a": 1}, 5], [{"b": 2}]),
    "nullable": ({"type": ["object", "null"], "properties": {"a": INTEGER}}, [None, {"a": 1}], [{"b": 2}]),
    "properties of properties": (
        {"type": "object", "properties": {"in": object_with("a")}},
        [{"in": {"a": 1}}],
        [{"in": {"b": 2}}],
    ),
    "items": ({"items": object_with("a")}, [[{"a": 1}]], [[{"b": 2}]]),
    "prefixItems": (
        {"prefixItems": [object_with("a"), object_with("b")]},
        [[{"a": 1}, {"b": 1}]],
        [[{"b": 1}], [{}, {"a": 1}]],
    ),
    "values of a dict": ({"additionalProperties": object_with("a")}, [{"k": {"a": 1}}], [{"k": {"b": 1}}]),
    "values by pattern": ({"patternProperties": {"^k": object_with("a")}}, [{"k": {"a": 1}}], [{"k": {"b": 1}}]),
    "a reference": ({"$ref": "#/$defs/A", "$defs": {"A": object_with("a")}}, [{"a": 1}], [{"b": 2}]),
    "an old reference": ({"$ref": "#/definitions/A", "definitions": {"A": object_with("a")}}, [{"a": 1}], [{"b": 2}]),
    "a pointer": (
        {"properties": {"x": object_with("a"), "y": {"$ref": "#/properties/x"}}},
        [{"y": {"a": 1}}],
        [{"y": {"b": 1}}],
    ),
    "an anchor": ({"$ref": "#A", "$defs": {"x": {"$anchor": "A", **object_with("a")}}}, [{"a": 1}], [{"b": 2}]),
    "a reference beside properties": (
        {"$ref": "#/$defs/A", "properties": {"b": INTEGER}, "$defs": {"A": object_with("a")}},
        [{"a": 1, "b": 2}],
        [{"c": 3}, {"a": "x"}],
    ),
    "recursion": (
        {"$ref": "#/$defs/Node", "$defs": {"Node": NODE}},
        [{"v": 1, "next": {"v": 2, "next": {"v": 3}}}],
        [{"v": 1, "next": {"v": 2, "next": {"v": 3, "x": 1}}}],
    ),
    "recursion of the whole": ({"properties": {"n": {"$ref": "#"}}}, [{"n": {"n": {}}}], [{"n": {"n": {"x": 1}}}]),
    "allOf": ({"allOf": [object_with("a"), object_with("b")]}, [{"a": 1, "b": 2}], [{"c": 3}, {"a": "x"}]),
    "allOf beside properties": (object_with("c", allOf=[object_with("a")]), [{"a": 1, "c": 2}], [{"b": 3}]),
    "allOf, one open": (
        {"allOf": [object_with("a"), object_with("b", additionalProperties=True)]},
        [{"c": 3}],
        [{"a": "x"}],
    ),
    "allOf, one closed": (
        {"allOf": [object_with("a", additionalProperties=False), object_with("b")]},
        [{"a": 1}],
        [{"b": 1}],
    ),
    "allOf, the same property": (
        {"allOf": [{"properties": {"x": object_with("a")}}, {"properties": {"x": object_with("b")}}]},
        [{"x": {"a": 1, "b": 2}}],
        [{"x": {"c": 3}}, {"x": {"a": "x"}}],
    ),
    "allOf, the same items": (
        {"allOf": [{"items": object_with("a")}, {"items": object_with("b")}]},
        [[{"a": 1, "b": 2}]],
        [[{"c": 3}]],
    ),
    "anyOf": ({"anyOf": [object_with("a"), object_with("b")]}, [{"a": 1}, {"b": 2}], [{"c": 3}]),
    "anyOf beside properties": (
        object_with("c", anyOf=[object_with("a", required=["a"]), object_with("b", required=["b"])]),
        [{"a": 1, "c": 1}, {"b": 1, "c": 1}],
        [{"a": 1, "b": "x", "c": 1}, {"c": 1}],
    ),
    "anyOf, names that are required": (
        object_with("a", "b", anyOf=[{"required": ["a"]}, {"required": ["b"]}]),
        [{"a": 1}, {"b": 1}, {"a": 1, "b": 1}],
        [{"a": 1, "c": 1}, {}],
    ),
    "anyOf, null": (
        {"properties": {"x": {"anyOf": [object_with("a"), {"type": "null"}]}}},
        [{"x": None}],
        [{"x": {"b": 1}}],
    ),
    "anyOf twice": (
        {"allOf": [{"anyOf": [object_with("a"), object_with("b")]}, {"anyOf": [object_with("c"), object_with("d")]}]},
        [{"a": 1, "c": 1}, {"b": 1, "d": 1}],
        [{"e": 1}],
    ),
    "anyOf, the same property": (
        {
            "properties": {"x": object_with("a")},
            "anyOf": [{"properties": {"x": object_with("b", required=["b"])}}, object_with("y")],
        },
        [{"x": {"a": 1, "b": 2}}, {"x": {"a": 1}, "y": 1}],
        [{"x": {"c": 1}}],
    ),
    "oneOf": (
        {"oneOf": [{"$ref": "#/$defs/Cat"}, {"$ref": "#/$defs/Dog"}], "$defs": PETS},
        [{"kind": "cat", "lives": 9}, {"kind": "dog", "age": 3}],
        [{"kind": "cat", "age": 3}, {"kind": "dog", "age": 3, "x": 1}],
    ),
    "then and else": (
        object_with("a", **{"if": {"required": ["a"]}, "then": object_with("b"), "else": object_with("c")}),
        [{"a": 1, "b": 2}, {"c": 3}],
        [{"d": 4}],
    ),
    "dependentSchemas": (object_with("a", dependentSchemas={"a": object_with("b")}), [{"a": 1, "b": 2}], [{"c": 3}]),
    "not": (object_with("a", **{"not": {"required": ["b"]}}), [{"a": 1}], [{"a": 1, "c": 1}]),
    "not, which needs another": (object_with("a", **{"not": {"properties": {"b": INTEGER}}}), [{"b": "x"}], [{"c": 1}]),
}
"""By name: a schema, values that its closed form accepts, and values that it rejects."""
OPEN: dict[str, tuple[Any, Any]] = {
    "more properties than are named": (object_with("a", minProperties=2), {"a": 1, "b": 2}),
    "a condition that counts": (object_with("a", **{"not": {"maxProperties": 1}}), {"a": 1, "b": 2}),
    "another document": ({"$ref": "https://example.org/schema.json", "properties": {"a": INTEGER}}, None),
    "another base": ({"properties": {"a": {"$id": "b", "$ref": "#/c"}}}, None),
    "a dynamic reference": ({"properties": {"a": {"$dynamicRef": "#b"}}}, None),
    "values by several rules": (
        {"properties": {"ab": object_with("a")}, "patternProperties": {"b$": object_with("b")}},
        {"ab": {"a": 1, "b": 1}},
    ),
    "values of a dict, of which another names some": (
        {"allOf": [{"additionalProperties": object_with("b")}], "properties": {"x": object_with("c")}},
        {"x": {"b": 1, "c": 2}},
    ),
    "alternatives that multiply": (
        {"allOf": [{"anyOf": [object_with(f"a{i}"), object_with(f"b{i}")]} for i in range(12)]},
        {"other": 1},
    ),
}
"""Schemas of objects that cannot be closed safely, and a value that they must still accept."""


@pytest.mark.parametrize("name", TABLE)
def test_close_objects_allows_named_properties_only(name: str) -> None:
    schema, good, bad = TABLE[name]
    before = json.dumps(schema)
    closed = close_objects(schema)
    assert not closed.open_objects
    assert json.dumps(schema) == before  # the caller's schema is not changed
    validator = Draft202012Validator(closed.schema)
    assert [one for one in good if not validator.is_valid(one)] == []
    assert [one for one in bad if validator.is_valid(one)] == []


@pytest.mark.parametrize("name", OPEN)
def test_undecidable_objects_stay_open_and_are_reported(name: str) -> None:
    schema, good = OPEN[name]
    closed = close_objects(schema)
    assert closed.open_objects
    if good is not None:
        assert Draft202012Validator(closed.schema).is_valid(good)


@pytest.mark.parametrize("value", [True, 1e9, -1, 2**63, [["a"]], [1], {"a": 1}, "nonsense", None, []])
@pytest.mark.parametrize("keyword", ["type", "properties", "required", "enum", "items", "allOf", "$ref", "$defs"])
def test_close_objects_survives_keywords_of_wrong_type(keyword: str, value: Any) -> None:
    inner = {"properties": {"a": {"type": "string"}, "b": {keyword: value}}, keyword: value}
    for schema in ({keyword: value}, inner, {"allOf": [inner, object_with("a")]}):
        close_objects(schema)
        close_objects(schema, by_name=True)


def test_close_objects_keeps_property_order() -> None:
    schema = {"allOf": [object_with("d", "c")], "properties": {"b": INTEGER, "a": INTEGER}, "required": ["z"]}
    assert list(close_objects(schema).schema["properties"]) == ["d", "c", "b", "a", "z"]


def test_by_name_keeps_properties_next_to_any_of() -> None:
    schema = object_with("c", required=["c"], anyOf=[object_with("a"), object_with("b")])
    closed = close_objects(schema, by_name=True).schema
    assert (closed["properties"], closed["required"]) == ({"c": INTEGER}, ["c"])
    assert Draft202012Validator(closed).is_valid({"a": 1, "c": 1})
    assert not Draft202012Validator(closed).is_valid({"d": 1, "c": 1})


NAMES = ("a", "b", "c", "d")


@st.composite
def schemas(draw: st.DrawFn, depth: int = 3) -> dict[str, Any]:
    """A schema of objects, lists and integers, combined by every supported keyword."""
    if depth == 0 or draw(st.integers(0, 5)) == 0:
        return draw(st.sampled_from([INTEGER, {"type": "string"}, {}, {"$ref": "#/$defs/one"}]))
    inner = schemas(depth - 1)
    schema: dict[str, Any] = {}
    if draw(st.booleans()):
        schema["type"] = draw(st.sampled_from(["object", ["object", "null"]]))
    if draw(st.integers(0, 3)):
        schema["properties"] = draw(st.dictionaries(st.sampled_from(NAMES), inner, max_size=3))
    if draw(st.integers(0, 3)) == 0:
        schema["required"] = draw(st.lists(st.sampled_from(NAMES), max_size=2, unique=True))
    extra = draw(
        st.sampled_from(["", "", "allOf", "anyOf", "oneOf", "$ref", "additionalProperties", "items", "not", "min"])
    )
    match extra:
        case "allOf" | "anyOf":
            schema[extra] = draw(st.lists(inner, min_size=1, max_size=2))
        case "oneOf":
            tags = [{"properties": {"tag": {"const": tag}}, "required": ["tag"]} for tag in ("x", "y")]
            schema["oneOf"] = [{**draw(tagged_objects(tag, inner)), "type": "object"} for tag in tags]
        case "$ref":
            schema["$ref"] = draw(st.sampled_from(["#/$defs/one", "#/$defs/two"]))
        case "additionalProperties":
            schema[extra] = draw(st.one_of(st.booleans(), inner))
        case "items":
            schema = {"type": "array", "items": draw(inner)}
        case "not":
            schema["not"] = {"required": [draw(st.sampled_from(NAMES))]}
        case "min":
            schema["minProperties"] = draw(st.integers(0, 3))
    return schema


@st.composite
def tagged_objects(draw: st.DrawFn, tag: dict[str, Any], inner: st.SearchStrategy[Any]) -> dict[str, Any]:
    more = draw(st.dictionaries(st.sampled_from(NAMES), inner, max_size=2))
    return {**tag, "properties": {**more, **tag["properties"]}}


@st.composite
def documents(draw: st.DrawFn) -> dict[str, Any]:
    return {**draw(schemas()), "$defs": {"one": draw(schemas(depth=2)), "two": draw(schemas(depth=1))}}


@st.composite
def instances(draw: st.DrawFn, document: dict[str, Any], together: list[Any], depth: int = 4) -> Any:
    """A value with only properties that the schemas name, for one branch of each alternative."""
    flat, pending, seen, chosen = [], list(together), set(), []
    while pending:
        one = pending.pop()
        if not isinstance(one, dict) or id(one) in seen:
            continue
        seen.add(id(one))
        flat.append(one)
        if "$ref" in one:
            pending.append(document["$defs"][one["$ref"].rpartition("/")[2]])
        pending += one.get("allOf", [])
        chosen += [draw(st.sampled_from(one[name])) for name in ("anyOf", "oneOf") if name in one]
        pending += chosen
    value = draw(values(document, flat, depth))
    for one in chosen:  # otherwise another branch may accept the value, to which its names are extra
        whole = {**one, "$defs": document["$defs"]} if isinstance(one, dict) else one
        assume(Draft202012Validator(whole).is_valid(value))
    return value


@st.composite
def values(draw: st.DrawFn, document: dict[str, Any], plain: list[Any], depth: int) -> Any:
    """A value valid under all of these schemas, without following their references and alternatives."""
    kinds = [one["type"] for one in plain if isinstance(one.get("type"), str)]
    for kind, value in (("integer", 1), ("string", "s")):
        if kind in kinds:
            return value
    if depth == 0 or any("object" not in one["type"] for one in plain if "type" in one and one["type"] != "array"):
        return None
    if "array" in kinds:
        items = [one["items"] for one in plain if "items" in one]
        return draw(st.lists(instances(document, items, depth - 1), max_size=2))
    named: dict[str, list[Any]] = {}
    for one in plain:
        for name, value in one.get("properties", {}).items():
            named.setdefault(name, []).append(value)
        for name in one.get("required", []):
            named.setdefault(name, [])
    for one in plain:
        for name in named.keys() - one.get("properties", {}).keys():
            named[name].append(one.get("additionalProperties"))
    needed = {name for one in plain for name in one.get("required", [])}
    value = {}
    for name, several in named.items():
        if name in needed or draw(st.booleans()):
            consts = [one["const"] for one in several if isinstance(one, dict) and "const" in one]
            value[name] = consts[0] if consts else draw(instances(document, several, depth - 1))
    return value


@settings(max_examples=examples(240), deadline=None)
@given(st.data())
def test_closed_schema_accepts_valid_values_without_extra_names(data: st.DataObject) -> None:
    document = data.draw(documents())
    try:
        value = data.draw(instances(document, [document]))
        if not Draft202012Validator(document).is_valid(value):
            return
    except RecursionError:  # a definition that refers to itself
        return
    closed = close_objects(document)
    assert Draft202012Validator(closed.schema).is_valid(value), json.dumps([document, closed.schema, value])


@settings(max_examples=examples(120), deadline=None)
@given(st.data())
def test_closed_schema_accepts_no_invalid_value(data: st.DataObject) -> None:
    document = data.draw(documents())
    closed = close_objects(document)
    assume(closed.schema is not False)
    try:
        value = data.draw(instances({"$defs": {}, **closed.schema}, [closed.schema]))
        if Draft202012Validator(closed.schema).is_valid(value):
            assert Draft202012Validator(document).is_valid(value), json.dumps([document, closed.schema, value])
    except RecursionError:
        return
