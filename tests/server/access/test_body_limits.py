"""The limits of a body's nesting, compared with a JSON parser, and of its size."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from quire.server.access.body_limits import MAX_JSON_DEPTH, too_deep
from tests.server.api import open_api
from tests.server.fake import FakeEngine, hashed

SCALARS = st.none() | st.booleans() | st.integers() | st.text(alphabet='[]{}"\\x\u2201\ud800')
TREES = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text('[{"\\'), inner))


def depth(value: Any) -> int:
    if isinstance(value, dict):
        value = list(value.values())
    return 1 + max(map(depth, value), default=0) if isinstance(value, list) else 0


@given(TREES, st.integers(0, 2 * MAX_JSON_DEPTH), st.booleans())
@example(["[" * 300], 0, False)
@example({"[" * 300: "\\"}, MAX_JSON_DEPTH - 1, True)
def test_the_depth_of_json(tree: Any, levels: int, ascii_only: bool) -> None:
    for level in range(levels):
        tree = [tree] if level % 2 else {"a": tree}
    body = json.dumps(tree, ensure_ascii=ascii_only).encode(errors="surrogatepass")
    assert too_deep(body) is (depth(tree) > MAX_JSON_DEPTH)


@given(st.binary(max_size=300) | st.text(alphabet='[]{}",\\ ').map(str.encode))
def test_bodies_that_are_not_json_raise_no_error(body: bytes) -> None:
    too_deep(body)


def test_a_string_without_an_end() -> None:
    assert not too_deep(b'"' + b"[" * 1000)
    assert not too_deep(b'{"a": "\\"' + b"[" * 1000)
    assert too_deep(b"[" * 1000)


async def chunked_body(count: int) -> AsyncIterator[bytes]:
    """A body of `count` KiB, sent without a Content-Length."""
    yield b'{"prompt": "'
    for _ in range(count):
        yield b"x" * 1024
    yield b'"}'


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"])
async def test_bodies_over_the_limits_are_refused(path: str) -> None:
    async with open_api(FakeEngine(hashed(b"ab")), max_body_size=1 / 16, max_model_len=100_000) as api:
        headers = {"Content-Type": "application/json"}
        for content in (chunked_body(64), b'{"prompt": "' + b"x" * 65_536 + b'"}', b"x" * 65_537):
            answer = await api.http.post(path, content=content, headers=headers)
            assert answer.status_code == 413, answer.text
            error = answer.json()["error"]
            assert error["type"] == "invalid_request_error"
            assert "65536 bytes" in error["message"]
            assert "--max-body-size" in error["message"]
        for content in (b"[" * 101 + b"]" * 101, b'{"prompt": ' * 101, b"[" * 60_000):
            answer = await api.http.post(path, content=content, headers=headers)
            assert answer.status_code == 400
            assert answer.json()["error"]["message"] == "The body is nested more than 100 levels deep"
        assert not api.engine.seen
        answer = await api.http.post("/tokenize", content=chunked_body(63), headers=headers)
        assert answer.json()["count"] == 63 * 1024
