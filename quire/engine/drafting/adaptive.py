"""How many drafts pay: decided for each sequence by what was accepted lately, and for each step by what it costs."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul

from quire.engine.core.drafter import (
    BANDS,
    BANDS_FROM,
    FORCED,
    FORCED_TEXT,
    Draft,
    Drafter,
    DraftRequests,
    StepwiseDrafter,
    kinds_of,
)
from quire.engine.core.request import Request
from quire.engine.types import EngineCoreRequest

EXPECTED = 0.6
"""The share of drafts that is expected to be right before any was tried,"""
EXPECTED_OF = {FORCED: 0.97, FORCED_TEXT: 0.9, 1: 0.25, 2: 0.5, 3: 0.8, 4: 0.9, 5: 0.93, 6: 0.96, 7: 0.97}
"""and of these kinds, about what it was for rewritten texts and for JSON of SmolLM2's."""
FADES, FADES_FOR_ALL = 0.8, 0.98
"""What is left of the experience with a sequence, and of that with all, after a guess was tried."""
FADES_UNTRIED = 0.99
"""The same after one that was not worth a try, so that it will be again."""


@dataclass(frozen=True, slots=True)
class StepCosts:
    """Seconds of a step by how many tokens it computes, as measured at the start."""

    tokens: tuple[int, ...]
    """Ascending, at least two."""
    seconds: tuple[float, ...]

    def of(self, tokens: int) -> float:
        """On the line between the nearest measured numbers; beyond them on the last such line."""
        right = min(max(bisect_left(self.tokens, tokens), 1), len(self.tokens) - 1)
        (low, high), (least, most) = self.tokens[right - 1 : right + 1], self.seconds[right - 1 : right + 1]
        return least + (most - least) * (tokens - low) / (high - low)


@dataclass(slots=True)
class Experience:
    """How often guesses were right lately. Tokens after a wrong one were not tried."""

    right: float = 0.0
    tried: float = 0.0

    def rate(self, expected: float) -> float:
        """The probability that the next token is right; as expected while little was tried."""
        return (self.right + expected) / (self.tried + 1)

    def add(self, right: int, tried: int) -> None:
        self.right += right
        self.tried += tried

    def fade(self, factor: float) -> None:
        self.right *= factor
        self.tried *= factor


class Experiences:
    """Of all kinds of guesses, with each sequence and with all."""

    def __init__(self) -> None:
        self._with_all: defaultdict[int, Experience] = defaultdict(Experience)
        """By kind."""
        self._with_one: dict[str, defaultdict[int, Experience]] = {}
        """By request id and kind."""

    def rate(self, request: Request, kind: int) -> float:
        """The probability that a token of this kind is right where those before it are."""
        if kind >= BANDS_FROM:
            return self._with_all[kind].rate((kind - BANDS_FROM + 0.5) / BANDS)
        return self._of(request)[kind].rate(self._with_all[kind].rate(EXPECTED_OF.get(kind, EXPECTED)))

    def chances(self, request: Request, kinds: Sequence[int]) -> list[float]:
        """Of tokens of these kinds, one after the other, that each and all before it are right."""
        return list(accumulate((self.rate(request, kind) for kind in kinds), mul))

    def learn(self, request: Request, kinds: Sequence[int], accepted: int) -> None:
        """Tokens of these kinds were tried, and so many accepted."""
        tried = kinds[: accepted + 1]
        for kind in set(tried):
            right, count = tried[:accepted].count(kind), tried.count(kind)
            for experience, factor in ((self._of(request)[kind], FADES), (self._with_all[kind], FADES_FOR_ALL)):
                experience.fade(factor)
                experience.add(right, count)

    def not_tried(self, request: Request, kind: int) -> None:
        """A guess of this kind was not worth a try."""
        self._of(request)[kind].fade(FADES_UNTRIED)
        self._with_all[kind].fade(FADES_UNTRIED)

    def end(self, request: Request) -> None:
        self._with_one.pop(request.engine_request.id, None)

    def _of(self, request: Request) -> defaultdict[int, Experience]:
        return self._with_one.setdefault(request.engine_request.id, defaultdict(Experience))


class Learning(Drafter):
    """It learns how often the tokens that another drafter guesses are right."""

    def __init__(self, drafter: Drafter | StepwiseDrafter, most: int, costs: StepCosts) -> None:
        """`most`: drafts of one sequence in one step. `costs`: of the steps that they are for."""
        self._most, self._costs = most, costs
        self._experiences = Experiences()
        self._kinds: dict[str, list[int]] = {}
        """By request id: of the tokens under way."""
        self._ended = drafter.on_finished

    def on_finished(self, request: Request) -> None:
        self._experiences.end(request)
        self._kinds.pop(request.engine_request.id, None)
        self._ended(request)


class Adaptive(Learning):
    """Of another drafter's guesses as many tokens as make the step give the most per second."""

    def __init__(self, drafter: Drafter, most: int, costs: StepCosts, own: StepCosts | None = None) -> None:
        """`own`: what the drafter's steps cost, each of which gives a draft of every sequence; None: nothing, and how
        many are worth it is decided when they are there."""
        super().__init__(drafter, most, costs)
        self._drafter, self._own = drafter, own

    def can_draft(self, request: EngineCoreRequest) -> bool:
        return self._drafter.can_draft(request)

    def propose(self, asked: DraftRequests, tokens: int) -> list[Draft]:
        seqs, useful = [engine_request for engine_request, _ in asked], [min(most, self._most) for _, most in asked]
        if self._own is not None:
            useful = self._worthwhile(seqs, [[0] * most for most in useful], tokens)
        guesses = self._drafter.propose(list(zip(seqs, useful, strict=True)), tokens)
        if self._own is None and not any(guess.token_ids for guess in guesses):
            return guesses
        kinds = [kinds_of(guess) for guess in guesses]
        counts = [len(each) for each in kinds]
        if self._own is None:
            counts = self._worthwhile(seqs, kinds, tokens)
        for request, made, count in zip(seqs, kinds, counts, strict=True):
            self._kinds[request.engine_request.id] = made[:count]
            if not count and (made or self._own is not None):
                self._experiences.not_tried(request, made[0] if made else 0)
        return [guess.first(count) for guess, count in zip(guesses, counts, strict=True)]

    def record_acceptance(self, request: Request, drafts: int, accepted: int) -> None:
        self._experiences.learn(request, self._kinds[request.engine_request.id][:drafts], accepted)
        self._drafter.record_acceptance(request, drafts, accepted)

    def _worthwhile(self, seqs: Sequence[Request], kinds: Sequence[list[int]], tokens: int) -> list[int]:
        """How many tokens of these kinds are worth it for each sequence."""
        each = 0.0 if self._own is None else self._own.of(len(seqs)) / len(seqs)
        chances = [self._experiences.chances(request, made) for request, made in zip(seqs, kinds, strict=True)]
        return worthwhile(chances, tokens, self._costs, each)


def worthwhile(chances: Sequence[Sequence[float]], tokens: int, costs: StepCosts, each: float = 0.0) -> list[int]:
    """How many of each proposal's drafts to compute, beside `tokens` tokens, for the most tokens per second.

    chances: of each draft, that it and those before it are right. each: seconds that it takes to make a draft.
    """
    ordered = sorted(
        ((chance, index) for index, row in enumerate(chances) for chance in row), key=lambda c: (-c[0], c[1])
    )
    gains = accumulate((chance for chance, _ in ordered), initial=float(len(chances)))
    speeds = [gain / (costs.of(tokens + count) + each * count) for count, gain in enumerate(gains)]
    counts = [0] * len(chances)
    for _, index in ordered[: speeds.index(max(speeds))]:
        counts[index] += 1
    return counts
