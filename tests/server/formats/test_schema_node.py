"""The types that a schema allows for a value, through references and combinations, as parsers and grammars use them."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.server.formats.schema_node import SchemaNode

STRING, NULL = {"type": "string"}, {"type": "null"}
DOCUMENT: dict[str, Any] = {
    "$defs": {
        "Text": STRING,
        "Maybe": {"anyOf": [{"$ref": "#/$defs/Text"}, NULL]},
        "a/b~c d": {"type": "integer"},
        "Loop": {"$ref": "#/$defs/Loop"},
        "Tree": {"type": "object", "properties": {"next": {"anyOf": [{"$ref": "#/$defs/Tree"}, NULL]}}},
        "Named": {"$anchor": "here", "type": "boolean"},
    },
    "properties": {"first": {"type": "array", "items": [STRING]}},
}


@pytest.mark.parametrize(
    ("schema", "kinds"),
    [
        ({"anyOf": [STRING, NULL]}, "string null"),
        ({"oneOf": [STRING, {"type": "object"}]}, "string object"),
        ({"type": ["string", "null"]}, "string null"),
        ({"type": ["integer", "string"]}, "number string"),
        ({"type": "string", "nullable": True}, "string null"),
        ({"$ref": "#/$defs/Text"}, "string"),
        ({"$ref": "#/$defs/Text", "description": "d"}, "string"),
        ({"$ref": "#/$defs/Maybe"}, "string null"),
        ({"$ref": "#/$defs/a~1b~0c%20d"}, "number"),
        ({"$ref": "#here"}, "boolean"),
        ({"$ref": "#"}, "object"),
        ({"$ref": "#/properties/first/items/0"}, "string"),
        ({"$ref": "#/$defs/Loop"}, "any"),
        ({"$ref": "#/$defs/Tree"}, "object"),
        ({"$ref": "#/$defs/Missing"}, "any"),
        ({"$ref": "https://example.org/schema"}, "any"),
        ({"allOf": [{"$ref": "#/$defs/Text"}], "default": "x"}, "string"),
        ({"allOf": [{"$ref": "#/$defs/Maybe"}, {"type": "string"}]}, "string"),
        ({"allOf": [{"minLength": 1}, {"anyOf": [STRING, {"type": "integer"}]}]}, "string"),
        ({"allOf": [{"type": "number"}, {"type": "integer"}]}, "number"),
        ({"allOf": [STRING, {"type": "integer"}]}, "string"),
        ({"const": "5"}, "string"),
        ({"const": 5}, "number"),
        ({"const": None}, "null"),
        ({"enum": ["a", 1, None]}, "string number null"),
        ({"type": "string", "enum": ["a", "b"]}, "string"),
        ({"anyOf": [{"const": "a"}, {"const": "b"}]}, "string"),
        ({"anyOf": [STRING, False]}, "string"),
        ({"pattern": "^x"}, "string"),
        ({"properties": {}}, "object"),
        ({}, "any"),
        (True, "any"),
        (False, "any"),
        (None, "any"),
        ({"type": "str"}, "any"),
        ({"anyOf": "no list"}, "any"),
        ({"type": [[]]}, "any"),
    ],
)
def test_variant_types_follow_resolved_schema(schema: Any, kinds: str) -> None:
    assert SchemaNode(schema, DOCUMENT).variant_types() == set(kinds.split())


@pytest.mark.parametrize(
    ("parameters", "kinds"),
    [
        ({"additionalProperties": STRING}, "string"),
        ({"properties": {"other": {"type": "integer"}}, "additionalProperties": {"$ref": "#/$defs/T"}}, "string"),
        ({"patternProperties": {"^.*$": STRING}}, "string"),
        ({"properties": {"other": STRING}, "additionalProperties": False}, "any"),
        ({"properties": {"other": STRING}}, "any"),
        ({}, "any"),
        ({"$ref": "#/$defs/Arguments"}, "string null"),
        ({"allOf": [{"$ref": "#/$defs/Arguments"}, {"properties": {"other": {}}}]}, "string null"),
        ({"oneOf": [{"properties": {"x": {"type": "integer"}}}, {"properties": {"x": STRING}}]}, "number string"),
    ],
)
def test_property_node_finds_argument_schema(parameters: dict[str, Any], kinds: str) -> None:
    shared = {"T": STRING, "Arguments": {"type": "object", "properties": {"x": {"type": ["string", "null"]}}}}
    whole = SchemaNode.from_document({**parameters, "$defs": shared})
    assert whole.property_node("x").variant_types() == set(kinds.split())


def test_exponentially_branching_schema_resolves_to_any_in_time() -> None:
    levels = {f"L{n}": {"anyOf": [{"$ref": f"#/$defs/L{n + 1}"}] * 4} for n in range(60)}
    assert "any" in SchemaNode({"$ref": "#/$defs/L0"}, {"$defs": levels}).variant_types()
    chain = {f"L{n}": {"anyOf": [{"$ref": f"#/$defs/L{n + 1}"}]} for n in range(5000)}
    document = {"$defs": chain, "properties": {"x": {"$ref": "#/$defs/L0"}}}
    assert SchemaNode.from_document(document).property_node("x").variant_types() == {"any"}
    assert len(SchemaNode.from_document(document).property_node("x").standalone_schema()["$defs"]) == 5000


def test_standalone_schema_includes_only_referenced_definitions() -> None:
    document = {
        "$defs": {"a/b": {"items": {"$ref": "#/$defs/c"}}, "c": STRING, "unused": {}},
        "properties": {"x": {"properties": {"$ref": {"$ref": "#/$defs/a~1b"}}, "const": {"$ref": "#/$defs/none"}}},
    }
    alone = SchemaNode.from_document(document).property_node("x").standalone_schema()
    assert alone == {
        "properties": {"$ref": {"$ref": "#/$defs/schema0"}},
        "const": {"$ref": "#/$defs/none"},
        "$defs": {"schema0": {"items": {"$ref": "#/$defs/schema1"}}, "schema1": STRING},
    }
    assert SchemaNode.from_document({"type": "string"}).standalone_schema() == STRING


schemas = st.recursive(
    st.sampled_from([True, False, None, 1, "x", {}, STRING, NULL, {"const": 1}, {"enum": []}, {"type": []}])
    | st.sampled_from([{"$ref": "#"}, {"$ref": "#/$defs/A"}, {"$ref": "#/x"}, {"required": [{}]}, {"properties": 1}]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["allOf", "anyOf", "oneOf", "items", "properties", "A", "$defs"]), inner)
    ),
    max_leaves=12,
)


@settings(deadline=None)
@given(schema=schemas)
def test_arbitrary_schema_has_variants_and_standalone_form(schema: Any) -> None:
    node = SchemaNode.from_document(schema)
    assert node.variants()
    for _, value, _ in node.property_entries():
        assert value.variants()
    assert node.item_node(0).variants()
    node.standalone_schema()
