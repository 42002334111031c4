"""Text that comes in pieces, for parsers written as generators: a parser that needs more text yields.

A parser decides nothing before it has the text that decides it, so the result does not depend on where text was cut.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import TypeVar

Result = TypeVar("Result")
Steps = Generator[None, None, Result]
"""A parser that yields whenever it needs more text, and returns a Result in the end."""

LONGEST_NAME = 256
"""Most characters of a tool's name and its surroundings. Text is held back no longer than that."""


class Source:
    """The text that has come and was not taken yet."""

    def __init__(self) -> None:
        self.text = ""
        self.closed = False
        """No more will come."""
        self._taken: list[str] = []

    def mark(self, text: str) -> None:
        """Forget the text taken so far; `taken` begins anew, with `text`."""
        self._taken = [text]

    @property
    def taken(self) -> str:
        """All text taken since the mark. It becomes content when what seemed to be a call is none."""
        return "".join(self._taken)

    def take(self, count: int) -> str:
        """The first characters."""
        taken, self.text = self.text[:count], self.text[count:]
        self._taken.append(taken)
        return taken

    def give_back(self, text: str) -> None:
        """Put back `text`, the end of what was taken."""
        self.text = text + self.text
        self._taken[-1] = self._taken[-1].removesuffix(text)

    def follows(self, literal: str) -> Steps[bool]:
        """Whether `literal` comes next, behind white space. If so, both are taken, otherwise nothing."""
        while True:
            text = self.text.lstrip()
            if text.startswith(literal):
                self.take(len(self.text) - len(text) + len(literal))
                return True
            if self.closed or not literal.startswith(text):
                return False
            yield

    def until(self, literals: tuple[str, ...], limit: int = LONGEST_NAME) -> Steps[tuple[str, str] | None]:
        """Take the text up to the first of `literals`, and the literal; give both. None, with nothing taken, when no
        literal comes within `limit` characters."""
        longest = max(map(len, literals))
        while True:
            found = first_of(self.text[: limit + longest], literals)
            if found is not None:
                start, literal = found
                return self.take(start + len(literal))[:start], literal
            if self.closed or len(self.text) >= limit + longest:
                return None
            yield

    def word(self) -> Steps[str]:
        """The next character that is not white space; empty at the end of the text. Takes nothing."""
        while not (text := self.text.lstrip()) and not self.closed:
            yield
        return text[:1]


def first_of(text: str, literals: tuple[str, ...]) -> tuple[int, str] | None:
    """Where the first of the literals in the text begins, and which it is."""
    found = [(start, literal) for literal in literals if (start := text.find(literal)) >= 0]
    return min(found) if found else None


def held_back(text: str, literals: tuple[str, ...]) -> int:
    """How many characters at the end of the text may be the beginning of a literal."""
    longest = max(map(len, literals))
    tail = text[-longest:]
    return max(
        (len(tail) - start for start in range(len(tail)) if any(one.startswith(tail[start:]) for one in literals)),
        default=0,
    )
