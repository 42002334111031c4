"""Text that comes in pieces, for parsers written as generators: where one lacks text it yields, and goes on with more.

Every decision waits until the text that decides it is there, so the result does not depend on where the text was cut.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import TypeVar

Result = TypeVar("Result")
Steps = Generator[None, None, Result]
"""A parser that may have to wait for more text, and what it returns in the end."""

LONGEST_NAME = 256
"""Characters that a tool's name and what stands around it may have: text without an end is held back no longer."""


class Source:
    """The text that came and was not taken yet."""

    def __init__(self) -> None:
        self.text = ""
        self.closed = False
        """No more will come."""
        self._taken: list[str] = []

    def mark(self, text: str) -> None:
        """Forget what was taken; what follows is remembered behind `text`."""
        self._taken = [text]

    @property
    def taken(self) -> str:
        """All text since the mark: what a call that turned out to be none gives back."""
        return "".join(self._taken)

    def take(self, count: int) -> str:
        """The first characters."""
        taken, self.text = self.text[:count], self.text[count:]
        self._taken.append(taken)
        return taken

    def give_back(self, text: str) -> None:
        """Put the end of what was taken back."""
        self.text = text + self.text
        self._taken[-1] = self._taken[-1].removesuffix(text)

    def follows(self, literal: str) -> Steps[bool]:
        """Whether `literal` comes next, behind white space; both are taken then, and nothing otherwise."""
        while True:
            text = self.text.lstrip()
            if text.startswith(literal):
                self.take(len(self.text) - len(text) + len(literal))
                return True
            if self.closed or not literal.startswith(text):
                return False
            yield

    def until(self, literals: tuple[str, ...], limit: int = LONGEST_NAME) -> Steps[tuple[str, str] | None]:
        """The text before the first of `literals` and that literal, both taken; None, and nothing taken, when none
        comes within `limit` characters."""
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
        """The next character that is not white space, which is not taken; empty at the end of the text."""
        while not (text := self.text.lstrip()) and not self.closed:
            yield
        return text[:1]


def first_of(text: str, literals: tuple[str, ...]) -> tuple[int, str] | None:
    """Where the first of the literals begins, and which it is."""
    found = [(start, literal) for literal in literals if (start := text.find(literal)) >= 0]
    return min(found) if found else None


def held_back(text: str, literals: tuple[str, ...]) -> int:
    """How many characters at the end of the text may begin one of the literals."""
    longest = max(map(len, literals))
    tail = text[-longest:]
    return max(
        (len(tail) - start for start in range(len(tail)) if any(one.startswith(tail[start:]) for one in literals)),
        default=0,
    )
