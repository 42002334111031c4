"""Under load guesses pay only where they are nearly certain: behind long matches, which are still there some tokens
later. So then a sequence of which nothing is guessed is looked at once in a while, and a server with nothing to guess
does not spend its steps on looking."""

from __future__ import annotations

from functools import lru_cache, partial

from quire.engine.core.drafter import Draft, Drafter, DraftRequests, grammar_of
from quire.engine.core.request import Request
from quire.engine.drafting.adaptive import StepCosts
from quire.engine.types import EngineCoreRequest

LOOKS_EVERY = 8
"""Tokens."""
MOST_DRAFTS = 32
UNDER_LOAD = 0.5
"""The least probability of being right with which a draft pays, from which on that is so."""


class SelectiveDrafter(Drafter):
    def __init__(self, drafter: Drafter, costs: StepCosts) -> None:
        self._drafter = drafter
        self._least = lru_cache(1024)(partial(least_chance, costs=costs))
        """By rows and tokens of a step."""
        self._tried: set[str] = set()
        """Request ids: of whose guesses some were computed in the last step."""

    def can_draft(self, request: EngineCoreRequest) -> bool:
        return self._drafter.can_draft(request)

    def propose(self, asked: DraftRequests, tokens: int) -> list[Draft]:
        loaded = self._least(len(asked), tokens) >= UNDER_LOAD
        places = [place for place, (request, _) in enumerate(asked) if not loaded or self._looks_at(request)]
        self._tried.clear()
        guesses = [Draft([]) for _ in asked]
        if places:
            found = self._drafter.propose([asked[place] for place in places], tokens)
            for place, guess in zip(places, found, strict=True):
                guesses[place] = guess
        return guesses

    def record_acceptance(self, request: Request, drafts: int, accepted: int) -> None:
        self._tried.add(request.engine_request.id)
        self._drafter.record_acceptance(request, drafts, accepted)

    def on_finished(self, request: Request) -> None:
        self._tried.discard(request.engine_request.id)
        self._drafter.on_finished(request)

    def _looks_at(self, request: Request) -> bool:
        """Some sequences in each step, rather than all in the same one. What a grammar forces is certain anywhere."""
        turn = (len(request.token_ids) + request.arrival) % LOOKS_EVERY == 0
        return turn or request.engine_request.id in self._tried or grammar_of(request.engine_request) is not None


def least_chance(rows: int, tokens: int, costs: StepCosts) -> float:
    """With what chance of being right up to MOST_DRAFTS drafts pay at the least, in a step that computes `tokens`
    tokens of so many rows."""
    now = costs.of(tokens)
    measured = [count - tokens for count in costs.tokens if 1 < count - tokens < MOST_DRAFTS]  # lines lie between these
    return min(rows * (costs.of(tokens + more) / now - 1.0) / more for more in (1, *measured, MOST_DRAFTS))
