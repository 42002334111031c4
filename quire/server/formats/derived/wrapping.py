"""Infers what stands around calls, and around the arguments of each, from turns with one call and with two."""

from __future__ import annotations

import re
from dataclasses import dataclass

from quire.server.formats.derived.probes import NotDerived
from quire.server.formats.forms.slots import (
    ARGUMENTS,
    INDEX,
    TAG,
    atoms,
    common_prefix,
    common_suffix,
    last_tag,
)


@dataclass(frozen=True, slots=True)
class Wrapping:
    begin: str
    head: str
    tail: str
    between: str
    end: str
    turn_end: str
    many: bool
    given: str
    first_index: int


def infer_wrapping(lead: str, one: str, two: str | None, plain_end: str) -> Wrapping:
    """`one` and `two`: answers with one call and with two, arguments replaced by their slot, without the `lead` that
    the prompt ends with. `plain_end`: what follows content in an answer without calls. Raises NotDerived."""
    before, _, after = one.partition(ARGUMENTS)
    single = two is None or two.count(ARGUMENTS) != 2
    if single or two is None:
        end, turn_end = split_end(after, plain_end)
        return Wrapping("", before, end, "", "", turn_end, False, "", 0)
    start, middle, last = two.split(ARGUMENTS)
    start, middle, first_index = numbered(start, middle)
    last = _same_number(last, middle)
    tail = common_prefix(middle, last)
    rest = middle[len(tail) :]
    head = common_suffix(lead + start, rest)
    given = ""
    if len(head) > len(start):
        extra = head[: len(head) - len(start)]
        if extra.strip():
            head, given = head.lstrip(), extra.lstrip()
        else:
            head = start
    if not head.strip():
        raise NotDerived("it does not show where a second call begins")
    begin = "" if given else start[: len(start) - len(head)]
    between = rest[: len(rest) - len(head)]
    end, turn_end = split_end(last[len(tail) :], plain_end)
    return Wrapping(begin, head, tail, between, end, turn_end, True, given, first_index)


def numbered(start: str, middle: str) -> tuple[str, str, int]:
    """The texts before two calls, with INDEX where each has its number."""
    left, right = atoms(start), atoms(middle)
    first = 0
    for place in range(1, min(len(left), len(right)) + 1):
        one, other = left[-place], right[-place]
        if one == other:
            continue
        if not (one.isdigit() and other.isdigit() and int(other) == int(one) + 1):
            break
        first = int(one)
        left[-place] = right[-place] = INDEX
    return "".join(left), "".join(right), first


def _same_number(last: str, middle: str) -> str:
    """The end of the last call, with INDEX where the end of the call before has its number."""
    left, right = atoms(middle), atoms(last)
    for place, (one, other) in enumerate(zip(left, right, strict=False)):
        if one != other and one.isdigit() and other.isdigit():
            right[place] = INDEX
    return "".join(right)


def split_end(text: str, plain_end: str) -> tuple[str, str]:
    """What ends calls, and what ends the turn: what a turn without calls ends with too."""
    shared = common_suffix(text, plain_end)
    end = text[: len(text) - len(shared)]
    tag = last_tag(plain_end)
    if tag and tag in end:
        end = end[: end.index(tag)]
    elif not shared.strip():
        # Another token ends a turn with calls: <|eom_id|> and not <|eot_id|>. It is the end's last tag.
        match = re.search(rf"\s*({TAG.pattern})\s*$", end)
        if match is not None and match[1].startswith("<|") | match[1].startswith("<｜"):
            return end[: match.start()], text[match.start() :]
    return end, text[len(end) :]
