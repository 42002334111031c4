"""Texts with places for names and arguments, cut into atoms, so that no comparison ends inside a tag or a word."""

from __future__ import annotations

import re
from itertools import takewhile

NAME, ID, INDEX, ARGUMENTS, KEY = "\ue000", "\ue001", "\ue002", "\ue003", "\ue004"
"""Characters for private use that stand for a call's name, id, number, arguments, and for an argument's key."""
SLOTS = re.compile("([\ue000-\ue004])")
ATOM = re.compile(
    r"<[|｜][^<>\s\ue000-\ue004]*>?|<[^<>\s\"'{}=\ue000-\ue004]*[=>]?|\[/?[A-Z_]+\]|[^\W\d]\w*|\d+|(?s:.)"
)
TAG = re.compile(r"<[^<>\s\ue000-\ue004]+>|\[/?[A-Z_]+\]")

GROUP = rf"(?:{TAG.pattern})(?:\w+(?:{TAG.pattern}))?"
"""A tag, or a word between two: </think>, <|close|>think<|sep|>."""


START = rf"(?:{TAG.pattern})(?:\w+(?:{TAG.pattern})?)?"
"""The same, or a tag and a word."""


def atoms(text: str) -> list[str]:
    return ATOM.findall(text)


def common_prefix(one: str, other: str) -> str:
    return "".join(_first_equal(atoms(one), atoms(other)))


def common_suffix(one: str, other: str) -> str:
    return "".join(reversed(_first_equal(atoms(one)[::-1], atoms(other)[::-1])))


def _first_equal(one: list[str], other: list[str]) -> list[str]:
    pairs = takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))
    return [left for left, _ in pairs]


def last_tag(text: str) -> str:
    """The last tag of a text; empty if there is none."""
    found = TAG.findall(text)
    return found[-1] if found else ""
