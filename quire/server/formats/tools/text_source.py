"""Text that comes in pieces, for parsers written as generators: a parser that needs more text yields.

A parser decides nothing before it has the text that decides it, so the result does not depend on where text was cut.
"""

from __future__ import annotations

import re
from collections.abc import Generator
from typing import TypeVar

Result = TypeVar("Result")
ParserSteps = Generator[None, None, Result]
"""A parser that yields whenever it needs more text, and returns a Result in the end."""

MAX_TOOL_NAME_LENGTH = 256
"""Most characters of a tool's name and its surroundings. Text is held back no longer than that."""
MAX_SPACE = 1024
"""White space in a row among the marks of a call; more is what a model repeats, and is read again with each piece."""

SPACE = re.compile(r"\s*")


class TextSource:
    """The text that has come and was not taken yet."""

    def __init__(self) -> None:
        self.text = ""
        self.is_closed = False
        """No more will come."""
        self.is_ended_by_model = False
        """The model ended the text by itself."""
        self._taken_pieces: list[str] = []

    def feed_parser(self, parser: ParserSteps[None], text: str, *, final: bool) -> bool:
        """Give a parser more text, of which with `final` no more comes. Returns whether the parser has ended."""
        self.text += text
        self.is_closed = final
        for _ in parser:
            return False  # it needs more text
        return True

    def reset_taken(self, text: str) -> None:
        """Forget the text taken so far; `taken_text` begins anew, with `text`."""
        self._taken_pieces = [text]

    @property
    def taken_text(self) -> str:
        """All text taken since the mark. It becomes content when what seemed to be a call is none."""
        return "".join(self._taken_pieces)

    def take_text(self, count: int) -> str:
        """The first characters."""
        taken, self.text = self.text[:count], self.text[count:]
        self._taken_pieces.append(taken)
        return taken

    def give_back(self, text: str) -> None:
        """Put back `text`, the end of what was taken."""
        self.text = text + self.text
        self._taken_pieces[-1] = self._taken_pieces[-1].removesuffix(text)

    def save_place(self) -> int:
        """A place to which `restore_place` can return, as long as no new mark is set."""
        return len(self._taken_pieces)

    def restore_place(self, place: int) -> None:
        """Put back all text taken since `save_place` gave this place."""
        self.text = "".join(self._taken_pieces[place:]) + self.text
        del self._taken_pieces[place:]

    def take_ignoring_space(self, literal: str) -> ParserSteps[bool]:
        """Take `literal`, with whatever white space. False, with nothing taken, when something else comes next."""
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
        """Take `literal` if it comes next, character by character."""
        while not self.is_closed and len(self.text) < len(literal) and literal.startswith(self.text):
            yield
        is_there = self.text.startswith(literal)
        self.take_text(len(literal) if is_there else 0)
        return is_there

    def take_after_space(self, literal: str) -> ParserSteps[bool]:
        """Whether `literal` comes next, behind white space. If so, both are taken, otherwise nothing."""
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
        """Take the text up to the first of `literals`, and the literal; give both. None, with nothing taken, when no
        literal comes within `limit` characters."""
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
        """The next character that is not white space; empty at the end of the text. Takes nothing."""
        while not (text := self.text.lstrip()) and not self.is_closed:
            yield
        return text[:1]


def match_end_ignoring_space(text: str, wanted: str) -> int | None:
    """Where `wanted` ends, read from the text's beginning over white space; -1: something else is there; None: the text
    ends before that is decided."""
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
    """Where the first of the literals in the text begins, and which it is."""
    matches = [(start, literal) for literal in literals if (start := text.find(literal)) >= 0]
    return min(matches) if matches else None


def partial_match_length(text: str, literals: tuple[str, ...]) -> int:
    """How many characters at the end of the text may be the beginning of a literal."""
    longest = max(map(len, literals), default=0)
    tail = text[-longest:]
    return max(
        (len(tail) - start for start in range(len(tail)) if any(one.startswith(tail[start:]) for one in literals)),
        default=0,
    )
