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


def having(*names: str, **more: Any) -> dict[str, Any]:
    """A schema of an object with these properties, all of them integers."""
    return {"type": "object", "properties": dict.fromkeys(names, INTEGER), **more}


TABLE: dict[str, tuple[Any, list[Any], list[Any]]] = {
    "properties": (having("a"), [{}, {"a": 1}], [{"a": 1, "b": 2}]),
    "properties, true": (having("a", additionalProperties=True), [{"a": 1, "b": 2}], []),
    "properties, false": (having("a", additionalProperties=False), [{"a": 1}], [{"b": 2}]),
    "properties, a schema": (having("a", additionalProperties=INTEGER), [{"b": 2}], [{"b": "x"}]),
    "properties, unevaluatedProperties": (having("a", unevaluatedProperties=True), [{"b": 2}], []),
    "properties, patterns": (having("a", patternProperties={"^x-": INTEGER}), [{"x-b": 2, "c": "any"}], [{"x-b": "2"}]),
    "no properties": ({"type": "object"}, [{"b": 2}], [[]]),
    "dict of": ({"type": "object", "additionalProperties": INTEGER}, [{"b": 2}], [{"b": "x"}]),
    "empty properties": ({"type": "object", "properties": {}}, [{}], [{"b": 2}]),
    "required is allowed": (having("a", required=["z"]), [{"z": "any"}], [{"z": 1, "b": 2}]),
    "dependentRequired is allowed": (having("a", dependentRequired={"a": ["z"]}), [{"a": 1, "z": 2}], [{"b": 2}]),
    "const is allowed": ({"properties": {"a": INTEGER}, "const": {"a": 1, "b": 2}}, [{"a": 1, "b": 2}], []),
    "no type": ({"properties": {"a": INTEGER}}, [{"a": 1}, 5], [{"b": 2}]),
    "nullable": ({"type": ["object", "null"], "properties": {"a": INTEGER}}, [None, {"a": 1}], [{"b": 2}]),
    "properties of properties": (
        {"type": "object", "properties": {"in": having("a")}},
        [{"in": {"a": 1}}],
        [{"in": {"b": 2}}],
    ),
    "items": ({"items": having("a")}, [[{"a": 1}]], [[{"b": 2}]]),
    "prefixItems": ({"prefixItems": [having("a"), having("b")]}, [[{"a": 1}, {"b": 1}]], [[{"b": 1}], [{}, {"a": 1}]]),
    "values of a dict": ({"additionalProperties": having("a")}, [{"k": {"a": 1}}], [{"k": {"b": 1}}]),
    "values by pattern": ({"patternProperties": {"^k": having("a")}}, [{"k": {"a": 1}}], [{"k": {"b": 1}}]),
    "a reference": ({"$ref": "#/$defs/A", "$defs": {"A": having("a")}}, [{"a": 1}], [{"b": 2}]),
    "an old reference": ({"$ref": "#/definitions/A", "definitions": {"A": having("a")}}, [{"a": 1}], [{"b": 2}]),
    "a pointer": (
        {"properties": {"x": having("a"), "y": {"$ref": "#/properties/x"}}},
        [{"y": {"a": 1}}],
        [{"y": {"b": 1}}],
    ),
    "an anchor": ({"$ref": "#A", "$defs": {"x": {"$anchor": "A", **having("a")}}}, [{"a": 1}], [{"b": 2}]),
    "a reference beside properties": (
        {"$ref": "#/$defs/A", "properties": {"b": INTEGER}, "$defs": {"A": having("a")}},
        [{"a": 1, "b": 2}],
        [{"c": 3}, {"a": "x"}],
    ),
    "recursion": (
        {"$ref": "#/$defs/Node", "$defs": {"Node": NODE}},
        [{"v": 1, "next": {"v": 2, "next": {"v": 3}}}],
        [{"v": 1, "next": {"v": 2, "next": {"v": 3, "x": 1}}}],
    ),
    "recursion of the whole": ({"properties": {"n": {"$ref": "#"}}}, [{"n": {"n": {}}}], [{"n": {"n": {"x": 1}}}]),
    "allOf": ({"allOf": [having("a"), having("b")]}, [{"a": 1, "b": 2}], [{"c": 3}, {"a": "x"}]),
    "allOf beside properties": (having("c", allOf=[having("a")]), [{"a": 1, "c": 2}], [{"b": 3}]),
    "allOf, one open": ({"allOf": [having("a"), having("b", additionalProperties=True)]}, [{"c": 3}], [{"a": "x"}]),
    "allOf, one closed": ({"allOf": [having("a", additionalProperties=False), having("b")]}, [{"a": 1}], [{"b": 1}]),
    "allOf, the same property": (
        {"allOf": [{"properties": {"x": having("a")}}, {"properties": {"x": having("b")}}]},
        [{"x": {"a": 1, "b": 2}}],
        [{"x": {"c": 3}}, {"x": {"a": "x"}}],
    ),
    "allOf, the same items": (
        {"allOf": [{"items": having("a")}, {"items": having("b")}]},
        [[{"a": 1, "b": 2}]],
        [[{"c": 3}]],
    ),
    "anyOf": ({"anyOf": [having("a"), having("b")]}, [{"a": 1}, {"b": 2}], [{"c": 3}]),
    "anyOf beside properties": (
        having("c", anyOf=[having("a", required=["a"]), having("b", required=["b"])]),
        [{"a": 1, "c": 1}, {"b": 1, "c": 1}],
        [{"a": 1, "b": "x", "c": 1}, {"c": 1}],
    ),
    "anyOf, names that are required": (
        having("a", "b", anyOf=[{"required": ["a"]}, {"required": ["b"]}]),
        [{"a": 1}, {"b": 1}, {"a": 1, "b": 1}],
        [{"a": 1, "c": 1}, {}],
    ),
    "anyOf, null": (
        {"properties": {"x": {"anyOf": [having("a"), {"type": "null"}]}}},
        [{"x": None}],
        [{"x": {"b": 1}}],
    ),
    "anyOf twice": (
        {"allOf": [{"anyOf": [having("a"), having("b")]}, {"anyOf": [having("c"), having("d")]}]},
        [{"a": 1, "c": 1}, {"b": 1, "d": 1}],
        [{"e": 1}],
    ),
    "anyOf, the same property": (
        {"properties": {"x": having("a")}, "anyOf": [{"properties": {"x": having("b", required=["b"])}}, having("y")]},
        [{"x": {"a": 1, "b": 2}}, {"x": {"a": 1}, "y": 1}],
        [{"x": {"c": 1}}],
    ),
    "oneOf": (
        {"oneOf": [{"$ref": "#/$defs/Cat"}, {"$ref": "#/$defs/Dog"}], "$defs": PETS},
        [{"kind": "cat", "lives": 9}, {"kind": "dog", "age": 3}],
        [{"kind": "cat", "age": 3}, {"kind": "dog", "age": 3, "x": 1}],
    ),
    "then and else": (
        having("a", **{"if": {"required": ["a"]}, "then": having("b"), "else": having("c")}),
        [{"a": 1, "b": 2}, {"c": 3}],
        [{"d": 4}],
    ),
    "dependentSchemas": (having("a", dependentSchemas={"a": having("b")}), [{"a": 1, "b": 2}], [{"c": 3}]),
    "not": (having("a", **{"not": {"required": ["b"]}}), [{"a": 1}], [{"a": 1, "c": 1}]),
    "not, which needs another": (having("a", **{"not": {"properties": {"b": INTEGER}}}), [{"b": "x"}], [{"c": 1}]),
}
"""By name: a schema, values that its closed form accepts, and values that it rejects."""
OPEN: dict[str, tuple[Any, Any]] = {
    "more properties than are named": (having("a", minProperties=2), {"a": 1, "b": 2}),
    "a condition that counts": (having("a", **{"not": {"maxProperties": 1}}), {"a": 1, "b": 2}),
    "another document": ({"$ref": "https://example.org/schema.json", "properties": {"a": INTEGER}}, None),
    "another base": ({"properties": {"a": {"$id": "b", "$ref": "#/c"}}}, None),
    "a dynamic reference": ({"properties": {"a": {"$dynamicRef": "#b"}}}, None),
    "values by several rules": (
        {"properties": {"ab": having("a")}, "patternProperties": {"b$": having("b")}},
        {"ab": {"a": 1, "b": 1}},
    ),
    "values of a dict, of which another names some": (
        {"allOf": [{"additionalProperties": having("b")}], "properties": {"x": having("c")}},
        {"x": {"b": 1, "c": 2}},
    ),
    "alternatives that multiply": (
        {"allOf": [{"anyOf": [having(f"a{i}"), having(f"b{i}")]} for i in range(12)]},
        {"other": 1},
    ),
}
"""Schemas of objects that cannot be closed safely, and a value that they must still accept."""


@pytest.mark.parametrize("name", TABLE)
def test_an_object_is_closed_by_what_is_said_of_it(name: str) -> None:
    schema, good, bad = TABLE[name]
    before = json.dumps(schema)
    found = close_objects(schema)
    assert not found.open_objects
    assert json.dumps(schema) == before  # the caller's schema is not changed
    validator = Draft202012Validator(found.schema)
    assert [one for one in good if not validator.is_valid(one)] == []
    assert [one for one in bad if validator.is_valid(one)] == []


@pytest.mark.parametrize("name", OPEN)
def test_what_cannot_be_decided_stays_open_and_is_told(name: str) -> None:
    schema, good = OPEN[name]
    found = close_objects(schema)
    assert found.open_objects
    if good is not None:
        assert Draft202012Validator(found.schema).is_valid(good)


@pytest.mark.parametrize("value", [True, 1e9, -1, 2**63, [["a"]], [1], {"a": 1}, "nonsense", None, []])
@pytest.mark.parametrize("keyword", ["type", "properties", "required", "enum", "items", "allOf", "$ref", "$defs"])
def test_a_keyword_of_another_type_is_left_for_the_compiler_to_refuse(keyword: str, value: Any) -> None:
    inner = {"properties": {"a": {"type": "string"}, "b": {keyword: value}}, keyword: value}
    for schema in ({keyword: value}, inner, {"allOf": [inner, having("a")]}):
        close_objects(schema)
        close_objects(schema, by_name=True)


def test_properties_keep_their_order() -> None:
    schema = {"allOf": [having("d", "c")], "properties": {"b": INTEGER, "a": INTEGER}, "required": ["z"]}
    assert list(close_objects(schema).schema["properties"]) == ["d", "c", "b", "a", "z"]


def test_the_first_level_names_properties_beside_alternatives() -> None:
    schema = having("c", required=["c"], anyOf=[having("a"), having("b")])
    found = close_objects(schema, by_name=True).schema
    assert (found["properties"], found["required"]) == ({"c": INTEGER}, ["c"])
    assert Draft202012Validator(found).is_valid({"a": 1, "c": 1})
    assert not Draft202012Validator(found).is_valid({"d": 1, "c": 1})


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
            schema["oneOf"] = [{**draw(having_tag(tag, inner)), "type": "object"} for tag in tags]
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
def having_tag(draw: st.DrawFn, tag: dict[str, Any], inner: st.SearchStrategy[Any]) -> dict[str, Any]:
    more = draw(st.dictionaries(st.sampled_from(NAMES), inner, max_size=2))
    return {**tag, "properties": {**more, **tag["properties"]}}


@st.composite
def documents(draw: st.DrawFn) -> dict[str, Any]:
    return {**draw(schemas()), "$defs": {"one": draw(schemas(depth=2)), "two": draw(schemas(depth=1))}}


@st.composite
def instances(draw: st.DrawFn, document: dict[str, Any], together: list[Any], depth: int = 4) -> Any:
    """A value with only properties that the schemas name, for one branch of each alternative."""
    plain, waiting, seen, chosen = [], list(together), set(), []
    while waiting:
        one = waiting.pop()
        if not isinstance(one, dict) or id(one) in seen:
            continue
        seen.add(id(one))
        plain.append(one)
        if "$ref" in one:
            waiting.append(document["$defs"][one["$ref"].rpartition("/")[2]])
        waiting += one.get("allOf", [])
        chosen += [draw(st.sampled_from(one[name])) for name in ("anyOf", "oneOf") if name in one]
        waiting += chosen
    value = draw(values(document, plain, depth))
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
def test_closing_allows_what_was_allowed_without_extra_names(data: st.DataObject) -> None:
    document = data.draw(documents())
    try:
        value = data.draw(instances(document, [document]))
        if not Draft202012Validator(document).is_valid(value):
            return
    except RecursionError:  # a definition that refers to itself
        return
    found = close_objects(document)
    assert Draft202012Validator(found.schema).is_valid(value), json.dumps([document, found.schema, value])


@settings(max_examples=examples(120), deadline=None)
@given(st.data())
def test_closing_allows_nothing_that_was_not_allowed(data: st.DataObject) -> None:
    document = data.draw(documents())
    found = close_objects(document)
    assume(found.schema is not False)
    try:
        value = data.draw(instances({"$defs": {}, **found.schema}, [found.schema]))
        if Draft202012Validator(found.schema).is_valid(value):
            assert Draft202012Validator(document).is_valid(value), json.dumps([document, found.schema, value])
    except RecursionError:
        return
