"""Infers what stands around content and around reasoning in an assistant's turn."""

from __future__ import annotations

import re
from dataclasses import dataclass

from quire.server.formats.derived.probes import CONTENT, NAMES, THOUGHT, Call, NotDerived, Prober
from quire.server.formats.forms.slots import GROUP, TAG, common_prefix, common_suffix


@dataclass(frozen=True, slots=True)
class Turn:
    """An assistant's turn, without calls."""

    lead: str
    """What the prompt ends with when an answer is asked for."""
    content_begin: str = ""
    content_end: str = ""
    end: str = ""
    thought_begin: str = ""
    thought_end: str = ""
    thought_space: str = ""
    """White space in front of what begins reasoning."""
    repeats: bool = False
    """The lead stands again between reasoning and content."""
    plain: str = ""
    """A turn with content and nothing else."""

    def answer(self, turn: str) -> str:
        """What the model writes of a turn: behind the prompt's end, and behind empty reasoning."""
        if turn.startswith(self.lead):
            rest = turn[len(self.lead) :]
        else:
            shared = common_prefix(self.lead, turn)
            rest = turn[len(shared) :]
            if not self.thought_end:
                rest = rest[len(common_prefix(rest, self.plain[len(shared) :].partition(CONTENT)[0])) :]
        if self.thought_end:
            head, found, after = rest.partition(self.thought_end)
            begin = self.thought_begin.strip()
            if found and not head.replace(begin, "").strip():
                rest = after
        return rest.removeprefix(self.content_begin + self.content_end) if self.content_end else rest


def infer_turn(prober: Prober) -> Turn:
    """Raises NotDerived if the template does not show content."""
    plain = prober.turn(content=CONTENT)
    if CONTENT not in plain:
        raise NotDerived("it does not show the content of an assistant's turn")
    begin, end, repeats = infer_thought(prober, plain)
    bare = Turn(prober.lead, thought_begin=begin.strip(), thought_end=end, plain=plain)
    before, _, after = bare.answer(plain).partition(CONTENT)
    frame = before if before.strip() and (plain.startswith(prober.lead) or end) else ""
    content_end = ""
    if frame:
        try:
            called = bare.answer(prober.turn([Call(NAMES[0], {})]))
        except NotDerived:
            called = ""
        if called.startswith(frame):
            content_end = common_prefix(called[len(frame) :], after)
    stripped = begin.strip()
    space = begin[: len(begin) - len(begin.lstrip())]
    return Turn(
        prober.lead, frame, content_end, after[len(content_end) :], stripped, end, space, repeats=repeats, plain=plain
    )


def infer_thought(prober: Prober, plain: str) -> tuple[str, str, bool]:
    """What stands before and behind reasoning, and whether what the prompt ends with stands again behind it. Empty
    texts if the template shows no reasoning."""
    for calls, content in (((), CONTENT), ((Call(NAMES[0], {}),), "")):
        try:
            turn = prober.turn(calls, content=content, thought=THOUGHT)
            without = prober.turn(calls, content=content) if calls else plain
        except NotDerived:
            continue
        if THOUGHT in turn:
            break
    else:
        return "", "", False
    before, _, after = turn.partition(THOUGHT)
    rest = common_suffix(after, without)
    end = after[: len(after) - len(rest)].strip()
    if not end:
        match = re.match(rf"\s*({GROUP})", after.partition(CONTENT)[0].partition(NAMES[0])[0])
        end = match[1] if match is not None else ""
    begin = _thought_begin(before, without, prober.lead, end)
    repeats = bool(prober.lead.strip()) and rest.lstrip().startswith(prober.lead.strip())
    return (begin, end, repeats) if begin and end else ("", "", False)


def _thought_begin(before: str, without: str, lead: str, end: str) -> str:
    """What stands before reasoning, given all `before` it in its turn, and a turn `without` reasoning."""
    if before.startswith(lead):
        begin = before[len(lead) :].rstrip()
    else:
        begin = before[len(common_prefix(before, without)) :].strip()
        given = lead[len(common_prefix(lead, before)) :].strip()
        if not begin and not given.startswith(end):
            begin = given
    if begin.strip():
        return begin
    tags = TAG.pattern if TAG.fullmatch(end) else GROUP
    match = re.search(rf"({tags})\s*$", before)
    return match[1] if match is not None else ""
