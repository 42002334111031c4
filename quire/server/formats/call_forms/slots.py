"""Texts are compared atom by atom, so that no common part ends inside a tag or word."""

from __future__ import annotations

import re
from itertools import takewhile

# Private-use characters.
NAME_SLOT = "\ue000"
ID_SLOT = "\ue001"
INDEX_SLOT = "\ue002"
ARGUMENTS_SLOT = "\ue003"
KEY_SLOT = "\ue004"
SLOT_PATTERN = re.compile("([\ue000-\ue004])")
ATOM = re.compile(
    r"<[|｜][^<>\s\ue000-\ue004]*>?|<[^<>\s\"'{}=\ue000-\ue004]*[=>]?|\[/?[A-Z_]+\]|[^\W\d]\w*|\d+|(?s:.)"
)
TAG = re.compile(r"<[^<>\s\ue000-\ue004]+>|\[/?[A-Z_]+\]")

TAG_GROUP = rf"(?:{TAG.pattern})(?:\w+(?:{TAG.pattern}))?"
"""Tags such as </think> or <|close|>think<|sep|>."""


TAG_START = rf"(?:{TAG.pattern})(?:\w+(?:{TAG.pattern})?)?"


def split_into_atoms(text: str) -> list[str]:
    return ATOM.findall(text)


def common_prefix_by_atoms(one: str, other: str) -> str:
    return "".join(_common_leading_atoms(split_into_atoms(one), split_into_atoms(other)))


def common_suffix_by_atoms(one: str, other: str) -> str:
    return "".join(reversed(_common_leading_atoms(split_into_atoms(one)[::-1], split_into_atoms(other)[::-1])))


def _common_leading_atoms(one: list[str], other: list[str]) -> list[str]:
    pairs = takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))
    return [left for left, _ in pairs]


def last_tag(text: str) -> str:
    tags = TAG.findall(text)
    return tags[-1] if tags else ""
