from __future__ import annotations

import re
from dataclasses import dataclass

from quire.server.formats.call_forms.slots import (
    ARGUMENTS_SLOT,
    INDEX_SLOT,
    TAG,
    common_prefix_by_atoms,
    common_suffix_by_atoms,
    last_tag,
    split_into_atoms,
)
from quire.server.formats.template_inference.template_prober import TemplateInferenceError


@dataclass(frozen=True, slots=True)
class CallWrapping:
    begin: str
    head: str
    tail: str
    between: str
    end: str
    turn_end: str
    allows_many: bool
    prompt_head: str
    first_index: int


def infer_wrapping(lead: str, one: str, two: str | None, end_without_calls: str) -> CallWrapping:
    """`one` and `two` are answers with one and two calls, without `lead`, and with slots instead of arguments. Raises
    TemplateInferenceError.
    """
    before, _, after = one.partition(ARGUMENTS_SLOT)
    single = two is None or two.count(ARGUMENTS_SLOT) != 2
    if single or two is None:
        end, turn_end = split_turn_end(after, end_without_calls)
        return CallWrapping("", before, end, "", "", turn_end, False, "", 0)
    start, middle, last = two.split(ARGUMENTS_SLOT)
    start, middle, first_index = insert_index_slots(start, middle)
    last = _insert_tail_index(last, middle)
    tail = common_prefix_by_atoms(middle, last)
    rest = middle[len(tail) :]
    head = common_suffix_by_atoms(lead + start, rest)
    prompt_head = ""
    if len(head) > len(start):
        extra = head[: len(head) - len(start)]
        if extra.strip():
            head, prompt_head = head.lstrip(), extra.lstrip()
        else:
            head = start
    if not head.strip():
        raise TemplateInferenceError("it does not render where a second call begins")
    begin = "" if prompt_head else start[: len(start) - len(head)]
    between = rest[: len(rest) - len(head)]
    end, turn_end = split_turn_end(last[len(tail) :], end_without_calls)
    return CallWrapping(begin, head, tail, between, end, turn_end, True, prompt_head, first_index)


def insert_index_slots(start: str, middle: str) -> tuple[str, str, int]:
    left, right = split_into_atoms(start), split_into_atoms(middle)
    first = 0
    for place in range(1, min(len(left), len(right)) + 1):
        one, other = left[-place], right[-place]
        if one == other:
            continue
        if not (one.isdigit() and other.isdigit() and int(other) == int(one) + 1):
            break
        first = int(one)
        left[-place] = right[-place] = INDEX_SLOT
    return "".join(left), "".join(right), first


def _insert_tail_index(last: str, middle: str) -> str:
    left, right = split_into_atoms(middle), split_into_atoms(last)
    for place, (one, other) in enumerate(zip(left, right, strict=False)):
        if one != other and one.isdigit() and other.isdigit():
            right[place] = INDEX_SLOT
    return "".join(right)


def split_turn_end(text: str, end_without_calls: str) -> tuple[str, str]:
    """Returns the calls' end and the turn's end. The latter usually ends turns without calls, too."""
    shared = common_suffix_by_atoms(text, end_without_calls)
    end = text[: len(text) - len(shared)]
    tag = last_tag(end_without_calls)
    if tag and tag in end:
        end = end[: end.index(tag)]
    elif not shared.strip():
        # Turns with calls may end with another token: <|eom_id|> instead of <|eot_id|>.
        match = re.search(rf"\s*({TAG.pattern})\s*$", end)
        if match is not None and match[1].startswith("<|") | match[1].startswith("<｜"):
            return end[: match.start()], text[match.start() :]
    return end, text[len(end) :]
