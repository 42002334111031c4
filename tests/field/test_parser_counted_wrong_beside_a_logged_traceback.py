"""Seen in our own CI on Python 3.11: "SystemError: AST constructor recursion depth mismatch", for valid text.

The garbage collector had a traceback logged while a text was parsed, which parses, too (python/cpython#106905). A call
in Python's syntax is read by the same parser: an answer must not fail because of another request's garbage.
"""

from __future__ import annotations

import ast
from typing import Any

import pytest

from tests.server.formats.test_tools import CALLS, TWO_CALLS, named, read


def test_a_call_is_read_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    parse, failures = ast.parse, [SystemError("AST constructor recursion depth mismatch (before=156, after=208)")]

    def disturbed(*args: Any, **named: Any) -> ast.AST:
        if failures:
            raise failures.pop()
        return parse(*args, **named)

    monkeypatch.setattr(ast, "parse", disturbed)
    assert read(named("pythonic"), [TWO_CALLS["pythonic"]]).calls == CALLS
    assert not failures
