from __future__ import annotations

import ast

import pytest

from tests import house


@pytest.mark.parametrize("word", ["told", "kept", "worked", "pinned", "asked"])
def test_participle_is_recognized(word: str) -> None:
    assert house.is_participle(word)


@pytest.mark.parametrize("word", ["read", "set", "need", "feed", "seed", "proceed", "quantized", "begin"])
def test_other_words_are_not_participles(word: str) -> None:
    assert not house.is_participle(word)


def test_branches_of_inner_functions_are_not_counted() -> None:
    source = """
def outer(x):
    if x:
        return [y for y in x]
    def inner():
        if x:
            pass
    try:
        return 1 if inner() else 2
    except OSError:
        return 3
"""
    function = ast.parse(source).body[0]
    assert isinstance(function, ast.FunctionDef)
    assert house.branches_of(function) == 4


def test_unknown_count_exits_with_code_2_and_lists_counts(capsys: pytest.CaptureFixture[str]) -> None:
    assert house.main(["participle"]) == 2
    assert "No such count: participle. There are participles, " in capsys.readouterr().err
