"""Parsers are generators that yield to wait for more text. They decide only on sufficient text, so results do not
depend on how the text was split.
"""

from __future__ import annotations

import re
from collections.abc import Generator
from typing import TypeVar

Result = TypeVar("Result")
ParserSteps = Generator[None, None, Result]

MAX_TOOL_NAME_LENGTH = 256
"""Bounds the characters held back for a name and its surroundings."""
MAX_SPACE = 1024
"""Longer whitespace is a model's repetition, and would be read again with each piece."""

SPACE = re.compile(r"\s*")


class TextSource:
    def __init__(self) -> None:
        self.text = ""
        self.is_closed = False
        self.is_ended_by_model = False
        self._taken_pieces: list[str] = []

    def feed_parser(self, parser: ParserSteps[None], text: str, *, final: bool) -> bool:
        """Returns True if the parser has ended."""
        self.text += text
        self.is_closed = final
        for _ in parser:
            return False
        return True

    def reset_taken(self, text: str) -> None:
        self._taken_pieces = [text]

    @property
    def taken_text(self) -> str:
        """Text taken since `reset_taken`. It becomes content if it is not a call."""
        return "".join(self._taken_pieces)

    def take_text(self, count: int) -> str:
        taken, self.text = self.text[:count], self.text[count:]
        self._taken_pieces.append(taken)
        return taken

    def give_back(self, text: str) -> None:
        self.text = text + self.text
        self._taken_pieces[-1] = self._taken_pieces[-1].removesuffix(text)

    def save_place(self) -> int:
        return len(self._taken_pieces)

    def restore_place(self, place: int) -> None:
        self.text = "".join(self._taken_pieces[place:]) + self.text
        del self._taken_pieces[place:]

    def take_ignoring_space(self, literal: str) -> ParserSteps[bool]:
        wanted = "".join(literal.split())
        while True:
            end = match_end_ignoring_space(self.text, wanted)
            if end is not None:
                self.take_text(max(end, 0))
                return end >= 0
            if self.is_closed:
                return False
            yield

    def take_exactly(self, literal: str) -> ParserSteps[bool]:
        while not self.is_closed and len(self.text) < len(literal) and literal.startswith(self.text):
            yield
        is_there = self.text.startswith(literal)
        self.take_text(len(literal) if is_there else 0)
        return is_there

    def take_after_space(self, literal: str) -> ParserSteps[bool]:
        while True:
            text = self.text.lstrip()
            if text.startswith(literal):
                self.take_text(len(self.text) - len(text) + len(literal))
                return True
            if self.is_closed or not literal.startswith(text):
                return False
            yield

    def take_through_first_literal(
        self, literals: tuple[str, ...], limit: int = MAX_TOOL_NAME_LENGTH
    ) -> ParserSteps[tuple[str, str] | None]:
        """Returns the text before the literal, and the literal. Consumes nothing if it returns None."""
        longest = max(map(len, literals))
        while True:
            match = find_first_literal(self.text[: limit + longest], literals)
            if match is not None:
                start, literal = match
                return self.take_text(start + len(literal))[:start], literal
            if self.is_closed or len(self.text) >= limit + longest:
                return None
            yield

    def peek_non_space_character(self) -> ParserSteps[str]:
        while not (text := self.text.lstrip()) and not self.is_closed:
            yield
        return text[:1]


def match_end_ignoring_space(text: str, wanted: str) -> int | None:
    """Returns the match's end, -1 for no match, or None if `text` is too short to decide."""
    place = 0
    for character in wanted:
        space = SPACE.match(text, place)
        assert space is not None, "it may be empty"
        if space.end() - place > MAX_SPACE:
            return -1
        place = space.end()
        if place == len(text):
            return None
        if text[place] != character:
            return -1
        place += 1
    return place


def find_first_literal(text: str, literals: tuple[str, ...]) -> tuple[int, str] | None:
    matches = [(start, literal) for literal in literals if (start := text.find(literal)) >= 0]
    return min(matches) if matches else None


def partial_match_length(text: str, literals: tuple[str, ...]) -> int:
    """Returns the number of characters at the end that may begin a literal."""
    longest = max(map(len, literals), default=0)
    tail = text[-longest:]
    return max(
        (len(tail) - start for start in range(len(tail)) if any(one.startswith(tail[start:]) for one in literals)),
        default=0,
    )
