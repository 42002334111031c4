"""Generated bodies of every route, up to 16 MB, get clear errors and do not disturb other clients.

An example is a field of a route's schema, a kind of value and a size, so hypothesis can shrink and print it.
`benchmarks/attacks.py` has the bodies that once broke the server.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from benchmarks.attacks import Attack
from tests.e2e.hostile import TENANTS, Watched, attacked, unnoticed, watched_server
from tests.server.api import describe_api
from tests.tiers import examples

pytestmark = pytest.mark.slow

MOST_BYTES = 15_900_000
"""A little less than --max-body-size, in bytes."""
ALLOWED = (200, *range(400, 430), 503)
WAITS = ("/init_weights_group", "/sleep", "/wake_up", "/update_weights", "/close_weights_group")
"""Routes for admins, or routes that wait for other processes."""
SWITCHES = ("stream", "background")
"""Fields whose answers are not JSON, or do not tell when the request ends."""
MESSAGES = [{"role": "user", "content": "hi"}]
BASES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "a", "max_tokens": 2},
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 2},
    "/v1/responses": {"input": "a", "max_output_tokens": 16},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 2},
    "/v1/messages/count_tokens": {"messages": MESSAGES},
    "/v1/decisions": {"input": "a", "questions": [{"type": "predicate", "instructions": "a"}]},
    "/tokenize": {"prompt": "a"},
    "/detokenize": {"tokens": [5]},
    "/v1/embeddings": {"input": "a"},
    "/pooling": {"input": "a"},
    "/v1/score": {"text_1": "a", "text_2": "b"},
    "/v1/rerank": {"query": "a", "documents": ["b"]},
    "/api/chat": {"messages": MESSAGES, "options": {"num_predict": 2}},
    "/api/generate": {"prompt": "a", "options": {"num_predict": 2}},
    "/api/embed": {"input": "a"},
    "/completion": {"prompt": "a", "n_predict": 2},
    "/infill": {"input_prefix": "a", "input_suffix": "b", "n_predict": 2},
}
VALUES: dict[str, tuple[bytes, bytes, bytes]] = {
    "text": (b'"', b"a", b'"'),
    "words": (b'"', b"once upon a ", b'"'),
    "characters": (b'"', "\u4e2d\U0001f600".encode(), b'"'),
    "escapes": (b'"', b"\\u0041", b'"'),
    "half surrogates": (b'"', b"\\ud800", b'"'),
    "digits": (b"1", b"7", b""),
    "lists": (b"[[]", b",[]", b"]"),
    "objects": (b"[{}", b",{}", b"]"),
    "numbers": (b"[1", b",1", b"]"),
    "texts": (b'["a"', b',"a"', b"]"),
    "nulls": (b"[null", b",null", b"]"),
    "messages": (b'[{"role":"user","content":"a"}', b',{"role":"user","content":"a"}', b"]"),
    "parts": (b'[{"type":"text","text":""}', b',{"type":"text","text":""}', b"]"),
    "tools": (b'[{"type":"function","function":{"name":"f"}}', b',{"type":"function","function":{"name":"f"}}', b"]"),
    "one key": (b'{"k":1', b',"k":1', b"}"),
    "deep": (b"", b"[", b""),
}
"""Kind of value: how its JSON begins, the part that is repeated, and how it ends."""


Schemas = dict[str, Any]
Step = tuple[str | int, str]
"""A field's name, or 0 for the first entry of a list; and the JSON of the sibling fields that the schema requires."""


@dataclass(frozen=True)
class Place:
    """A field of a route's body and the path to it."""

    route: str
    path: tuple[Step, ...]

    def __repr__(self) -> str:
        return ".".join([self.route, *(str(name) for name, _ in self.path)])

    def body(self, value: bytes) -> bytes:
        mark = "@value@"
        inner: Any = mark
        for name, beside in reversed(self.path):
            inner = [inner] if name == 0 else json.loads(beside) | {name: inner}
        return json.dumps(BASES.get(self.route, {}) | inner).encode().replace(json.dumps(mark).encode(), value)


def places() -> list[Place]:
    """Every field of every body in the OpenAPI description, nested ones included, and one unknown field per route."""
    described = describe_api()
    schemas = described["components"]["schemas"]
    body_places: list[Place] = []
    for route, operations in described["paths"].items():
        if route in WAITS or "post" not in operations or "requestBody" not in operations["post"] or "{" in route:
            continue
        (content,) = operations["post"]["requestBody"]["content"].values()
        paths = dict.fromkeys(fields(content["schema"], schemas, (), ()))
        body_places += [Place(route, path) for path in paths if path and path[-1][0] not in SWITCHES]
        body_places.append(Place(route, (("unknown", "{}"),)))
    return body_places


def fields(schema: Any, schemas: Schemas, path: tuple[Step, ...], seen: tuple[str, ...]) -> list[tuple[Step, ...]]:
    """Paths of a schema's fields and of their nested fields; a recursive schema is followed once."""
    name = schema.get("$ref", "").rpartition("/")[2]
    if name in seen or len(path) > 8:
        return [path]
    if name:
        return fields(schemas[name], schemas, path, (*seen, name))
    paths = [path]
    for each in (*schema.get("anyOf", ()), *schema.get("oneOf", ())):
        paths += fields(each, schemas, path, seen)
    for field, inner in schema.get("properties", {}).items():
        beside = {name: value for name, value in smallest_value(schema, schemas).items() if name != field}
        paths += fields(inner, schemas, (*path, (field, json.dumps(beside))), seen)
    if schema.get("type") == "object" and not schema.get("properties"):
        paths.append((*path, ("any", "{}")))
    if isinstance(schema.get("items"), dict) and path:
        paths += fields(schema["items"], schemas, (*path, (0, "")), seen)
    return paths


def smallest_value(schema: Any, schemas: Schemas) -> Any:
    """Return a small value that a schema allows."""
    if "$ref" in schema:
        return smallest_value(schemas[schema["$ref"].rpartition("/")[2]], schemas)
    for union in ("anyOf", "oneOf"):
        if union in schema:
            return smallest_value(schema[union][0], schemas)
    if "const" in schema or "enum" in schema:
        return schema.get("const", schema.get("enum", [None])[0])
    if schema.get("type") == "object":
        own = schema.get("properties", {})
        needed = {name for name, each in own.items() if "const" in each} | {*schema.get("required", ())}
        return {name: smallest_value(own[name], schemas) for name in own if name in needed}
    return {"string": "a", "integer": 1, "number": 1, "boolean": True, "array": []}.get(schema.get("type", ""))


def value_of(kind: str, size: int) -> bytes:
    begin, piece, end = VALUES[kind]
    return begin + piece * (max(size - len(begin) - len(end), 0) // len(piece)) + end


sizes = st.floats(0, 1).map(lambda share: int(16 * (MOST_BYTES / 16) ** share))
"""Bytes on a logarithmic scale: as often from 1 to 10 KB as from 1 to 10 MB."""


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    with watched_server(tmp_path_factory.mktemp("fuzz")) as server:
        yield server


@settings(
    max_examples=examples(400), deadline=None, suppress_health_check=list(HealthCheck), report_multiple_bugs=False
)
@given(
    place=st.sampled_from(places()), kind=st.sampled_from(sorted(VALUES)), size=sizes, callers=st.sampled_from([1, 6])
)
@pytest.mark.timeout(3600)
def test_fuzzed_bodies_do_not_affect_other_clients(
    watched: Watched, place: Place, kind: str, size: int, callers: int
) -> None:
    body = place.body(value_of(kind, size))
    attack = Attack(f"{place.route} {place.path}: {kind} of {size}", place.route, lambda: body, ALLOWED)
    sent = TENANTS[:callers]
    unnoticed(watched, lambda: asyncio.run(attacked(watched, attack, sent)), {*ALLOWED, 408})
