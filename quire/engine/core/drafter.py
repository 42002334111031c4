"""Who guesses the tokens that follow. A guess is verified in the step that computes it, so it changes nothing but how
many tokens a step gives."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence as SequenceOf
from typing import NamedTuple

from quire.engine.core.sequence import Sequence
from quire.engine.types import Grammar, Request

Asked = SequenceOf[tuple[Sequence, int]]
"""Sequences whose next tokens are to be guessed, all of whose tokens are known, and how many are useful at most."""


NEXT = 0
"""The kind of tokens of which nothing else is known. Those from 1 on are copied from behind a match of that many bits
of length: kind 3 are matches of four to seven tokens."""
FORCED = -1
"""The kind of tokens that a grammar forces. Nearly all are right: a model may write the same text in other tokens, or
JSON with other whitespace."""
FORCED_TEXT = -2
"""The kind of tokens whose text a grammar forces, but which might go on."""
BANDS = 10
"""Of how likely a drafter holds its tokens: what it says of each band is learnt, from all sequences alike."""
BANDS_FROM = 100
"""The kinds of tokens from here on are these bands."""


class Guess(NamedTuple):
    """Tokens that may follow; none where nothing is worth a try."""

    tokens: list[int]
    kinds: SequenceOf[int] = ()
    """Of each token; those of one kind are right about equally often. None: all are of the kind NEXT,"""
    chances: SequenceOf[float] = ()
    """or the drafter says of each how likely it holds it."""

    def first(self, count: int) -> Guess:
        """So many tokens of it."""
        return Guess(self.tokens[:count], self.kinds[:count], self.chances[:count])


def kinds_of(guess: Guess) -> list[int]:
    """The kind of each token; where the drafter says how likely it holds them, the band of that."""
    if guess.chances:
        return [BANDS_FROM + min(int(chance * BANDS), BANDS - 1) for chance in guess.chances]
    return list(guess.kinds) or [NEXT] * len(guess.tokens)


def grammar_of(request: Request) -> Grammar | None:
    """What the request's text must match, if anything."""
    return None if request.sampling is None else request.sampling.grammar


class Drafter(ABC):
    @abstractmethod
    def propose(self, asked: Asked, tokens: int) -> list[Guess]:
        """A guess for each of the sequences. `tokens`: what the step computes without them."""

    def may_guess(self, request: Request) -> bool:
        """Whether it ever guesses tokens of such a request, whose steps must all be learnt from one by one then."""
        return True

    def learn(self, seq: Sequence, drafts: int, accepted: int) -> None:  # noqa: B027 - most have nothing to learn
        """So many of a sequence's drafts were computed, and so many of them accepted."""

    def end(self, seq: Sequence) -> None:  # noqa: B027
        """The sequence has ended."""


class StepwiseDrafter(ABC):
    """Makes one token after the other of each guess, so that somebody may decide after each whether one more pays."""

    @abstractmethod
    def begin(self, asked: Asked) -> list[Guess]:
        """The first token of a guess for each of the sequences, or none. `another` appends to these guesses."""

    @abstractmethod
    def another(self, places: SequenceOf[int]) -> None:
        """One token more for the guesses at these places, ascending, all of which got one in the last call."""

    def end(self, seq: Sequence) -> None:  # noqa: B027
        """The sequence has ended."""


class NoDrafts(Drafter):
    def may_guess(self, request: Request) -> bool:
        return False

    def propose(self, asked: Asked, tokens: int) -> list[Guess]:
        return [Guess([]) for _ in asked]
