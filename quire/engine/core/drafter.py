"""Speculative decoding: the interface of drafters. Draft tokens are verified in the step that computes them, so they
change nothing but how many tokens a step gives."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

from quire.engine.core.request import Request
from quire.engine.types import EngineCoreRequest, Grammar

DraftRequests = Sequence[tuple[Request, int]]
"""Requests to draft for, whose tokens are all known on the host, each with the largest useful number of drafts."""


NEXT = 0
"""The kind of draft tokens of which nothing else is known. Kinds from 1 on are n-gram lookup's: the tokens after a
match whose length has this many bits, so kind 3 follows matches of four to seven tokens."""
FORCED = -1
"""The kind of tokens that a grammar forces. Nearly all are accepted: a model may write the same text in other tokens,
or JSON with other whitespace."""
FORCED_TEXT = -2
"""The kind of tokens whose text a grammar forces, but which might continue."""
BANDS = 10
"""Number of probability buckets; acceptance is tracked per bucket, over all requests."""
BANDS_FROM = 100
"""Kinds from here on are these buckets."""


class Draft(NamedTuple):
    """Draft tokens of one request; empty if none is worth a try."""

    token_ids: list[int]
    kinds: Sequence[int] = ()
    """Of each token; tokens of one kind are accepted about equally often. Empty: all are NEXT, or `probabilities` has
    them."""
    probabilities: Sequence[float] = ()
    """Of each token, as the drafter sees it."""

    def first(self, count: int) -> Draft:
        """Its first `count` tokens."""
        return Draft(self.token_ids[:count], self.kinds[:count], self.probabilities[:count])


def kinds_of(guess: Draft) -> list[int]:
    """The kind of each token; if the drafter gives probabilities, their buckets."""
    if guess.probabilities:
        return [BANDS_FROM + min(int(chance * BANDS), BANDS - 1) for chance in guess.probabilities]
    return list(guess.kinds) or [NEXT] * len(guess.token_ids)


def grammar_of(request: EngineCoreRequest) -> Grammar | None:
    """The request's grammar, if it has one."""
    return None if request.sampling is None else request.sampling.grammar


class Drafter(ABC):
    @abstractmethod
    def propose(self, asked: DraftRequests, tokens: int) -> list[Draft]:
        """Drafts for each of the requests. `tokens`: how many tokens the step computes without them."""

    def can_draft(self, request: EngineCoreRequest) -> bool:
        """Whether it ever drafts for such a request. If so, the host must see each token before the next step."""
        return True

    def record_acceptance(self, request: Request, drafts: int, accepted: int) -> None:  # noqa: B027 - most have nothing to learn
        """`drafts` draft tokens of a request were verified, and `accepted` of them accepted."""

    def on_finished(self, request: Request) -> None:  # noqa: B027
        """The request has finished."""


class StepwiseDrafter(ABC):
    """Drafts one token after the other, so that the caller can decide after each whether one more pays."""

    @abstractmethod
    def begin(self, asked: DraftRequests) -> list[Draft]:
        """The first draft token of each request, or none. `another` appends to these drafts."""

    @abstractmethod
    def another(self, places: Sequence[int]) -> None:
        """One more token for the drafts at these indices, ascending, all of which got one in the last call."""

    def on_finished(self, request: Request) -> None:  # noqa: B027
        """The request has finished."""


class NoDrafts(Drafter):
    def can_draft(self, request: EngineCoreRequest) -> bool:
        return False

    def propose(self, asked: DraftRequests, tokens: int) -> list[Draft]:
        return [Draft([]) for _ in asked]
