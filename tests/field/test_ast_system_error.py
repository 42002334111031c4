"""A spurious SystemError of ast.parse does not fail an answer. Seen in our CI on Python 3.11: "SystemError: AST
constructor recursion depth mismatch" for valid text.

The garbage collector logged a traceback during a parse, and logging parses, too (python/cpython#106905). Tool calls in
Python syntax use the same parser, so another request's garbage must not make an answer fail.
"""

from __future__ import annotations

import ast
from typing import Any

import pytest

from tests.server.formats.test_tools import CALLS, TWO_CALLS, named, read


def test_pythonic_tool_call_is_parsed_after_ast_system_error(monkeypatch: pytest.MonkeyPatch) -> None:
    parse, failures = ast.parse, [SystemError("AST constructor recursion depth mismatch (before=156, after=208)")]

    def disturbed(*args: Any, **named: Any) -> ast.AST:
        if failures:
            raise failures.pop()
        return parse(*args, **named)

    monkeypatch.setattr(ast, "parse", disturbed)
    assert read(named("pythonic"), [TWO_CALLS["pythonic"]]).calls == CALLS
    assert not failures
