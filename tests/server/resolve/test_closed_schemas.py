"""Objects without additionalProperties are closed in every field that takes a schema, over HTTP, unless a flag says
otherwise.
"""

from __future__ import annotations

from typing import Any

import pytest

from quire.engine.common.errors import InvalidRequest
from quire.engine.offline.params import StructuredOutputsParams
from tests.server.resolve.test_tool_requests import HELLO, ONE, PATH, function, speaker, strict

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
UNDECIDED = {**SCHEMA, "$defs": {"other": {}}, "minProperties": 2, "required": ["a"]}
FIELDS: list[tuple[str, dict[str, Any]]] = [
    (PATH, {"messages": HELLO, "response_format": FORMAT}),
    (PATH, {"messages": HELLO, "structured_outputs": {"json": SCHEMA}}),
    (PATH, {"messages": HELLO, "guided_json": SCHEMA}),
    (PATH, {"messages": HELLO, "tools": [function("f", a={"type": "integer"})], "tool_choice": "required"}),
    (PATH, {"messages": HELLO, "tools": [strict(function("f", a={"type": "integer"}))]}),
    ("/v1/completions", {"prompt": "a", "structured_outputs": {"json": SCHEMA}}),
    ("/v1/responses", {"input": "a", "text": {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}}}),
    ("/v1/messages", {"messages": HELLO, "max_tokens": 9, "output_format": {"type": "json_schema", "schema": SCHEMA}}),
    ("/api/chat", {"messages": HELLO, "stream": False, "format": SCHEMA}),
]


@pytest.mark.few(3)
@pytest.mark.parametrize(("path", "body"), FIELDS)
async def test_disable_additional_properties_flag_applies_to_every_schema_field(
    path: str, body: dict[str, Any]
) -> None:
    for close in (True, False):
        async with speaker(ONE, disable_additional_properties=close) as api:
            answer = await api.http.post(path, json=body)
            assert answer.status_code == 200, answer.text
            assert ('"additionalProperties": false' in api.engine.seen[-1].params.grammar.text) is close
            assert "X-Schema-Open" not in answer.headers


async def test_x_schema_open_header_names_schema_left_open() -> None:
    async with speaker(ONE) as api:
        answer = await api.http.post(PATH, json={"messages": HELLO, "structured_outputs": {"json": UNDECIDED}})
    assert answer.headers["X-Schema-Open"] == "structured_outputs"


async def test_request_can_disable_additional_properties() -> None:
    structured_outputs = {"json": SCHEMA, "disable_additional_properties": True}
    async with speaker(ONE, disable_additional_properties=False) as api:
        answer = await api.http.post(PATH, json={"messages": HELLO, "structured_outputs": structured_outputs})
        assert "x-ignored-params" not in answer.headers
        assert '"additionalProperties": false' in api.engine.seen[-1].params.grammar.text


@pytest.mark.parametrize(
    ("value", "place"),
    [
        ({"const": 2512292042121000001}, "properties.a.const: 2512292042121000001"),
        ({"enum": [1, {"b": [2**60 + 1]}]}, "properties.a.enum: 1152921504606846977"),
        ({"type": "integer", "minimum": 2**53 + 1}, "properties.a.minimum: 9007199254740993"),
        ({"type": "integer", "maximum": 2**64}, "properties.a.maximum: 18446744073709551616"),
        ({"type": "integer", "multipleOf": 2**53 + 1}, "properties.a.multipleOf: 9007199254740993"),
    ],
)
async def test_schema_number_beyond_double_is_rejected_by_path(value: Any, place: str) -> None:
    schema = {"type": "object", "properties": {"a": value}}
    async with speaker(ONE) as api:
        error = (await api.post(PATH, {"messages": HELLO, "guided_json": schema}, 400))["error"]
    assert place in error["message"]
    assert error["param"] == "guided_json"


async def test_exact_schema_numbers_and_unknown_formats_are_accepted() -> None:
    values: list[Any] = [{"const": 2**60}, {"type": "integer", "minimum": 0, "maximum": 2**63 - 1}, {"format": "path"}]
    async with speaker(ONE) as api:
        for value in values:
            schema = {"type": "object", "properties": {"a": value}}
            await api.post(PATH, {"messages": HELLO, "guided_json": schema})


def test_structured_outputs_params_close_and_check_schemas() -> None:
    assert '"additionalProperties": false' in StructuredOutputsParams(json=SCHEMA).as_grammar().text
    letter = StructuredOutputsParams(json=SCHEMA, disable_additional_properties=False)
    assert "additionalProperties" not in letter.as_grammar().text
    with pytest.raises(InvalidRequest, match=r"properties\.a\.const"):
        StructuredOutputsParams(json={"properties": {"a": {"const": 2**60 + 1}}})
