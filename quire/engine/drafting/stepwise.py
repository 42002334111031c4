"""Guesses that are made token by token: as long as one more is worth what it costs."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from quire.engine.core.drafter import NEXT, Draft, DraftRequests, StepwiseDrafter, kinds_of
from quire.engine.core.request import Request
from quire.engine.drafting.adaptive import Learning, StepCosts


class Stepwise(Learning):
    def __init__(self, drafter: StepwiseDrafter, most: int, costs: StepCosts, own: StepCosts) -> None:
        """`own`: what it costs to make one token more of so many guesses."""
        super().__init__(drafter, most, costs)
        self._drafter, self._own = drafter, own

    def propose(self, asked: DraftRequests, tokens: int) -> list[Draft]:
        useful = [min(most, self._most) for _, most in asked]
        seqs = [engine_request for engine_request, _ in asked]
        chosen = self._chosen(seqs, [1.0 if most > 0 else 0.0 for most in useful], float(len(asked)), 0.0, tokens)
        for place in set(range(len(seqs))).difference(chosen):
            self._experiences.not_tried(seqs[place], NEXT)
        if not chosen:
            guesses = [Draft([]) for _ in asked]
        else:
            tried = [most if place in chosen else 0 for place, most in enumerate(useful)]
            guesses = self._drafter.begin(list(zip(seqs, tried, strict=True)))
            self._extend(guesses, seqs, useful, tokens)
        for request, guess in zip(seqs, guesses, strict=True):
            self._kinds[request.engine_request.id] = kinds_of(guess)
        return guesses

    def record_acceptance(self, request: Request, drafts: int, accepted: int) -> None:
        kinds = self._kinds[request.engine_request.id][:drafts]
        self._experiences.learn(request, kinds, accepted)
        self._experiences.learn(request, [NEXT] * len(kinds), accepted)

    def _extend(self, guesses: list[Draft], seqs: list[Request], useful: list[int], tokens: int) -> None:
        """Add to the guesses while that pays."""
        spent, going = self._own.of(max(sum(1 for guess in guesses if guess.token_ids), 1)), list(range(len(guesses)))
        while True:
            made = sum(len(guess.token_ids) for guess in guesses)
            chances = [
                self._experiences.chances(request, kinds_of(each)) for request, each in zip(seqs, guesses, strict=True)
            ]
            gain = len(guesses) + sum(map(sum, chances))
            last = [0.0] * len(guesses)
            for place in going:
                if 0 < len(guesses[place].token_ids) < useful[place]:
                    last[place] = chances[place][-1]
            going = self._chosen(seqs, last, gain, spent, tokens + made)
            if not going:
                return
            self._drafter.another(going)
            spent += self._own.of(len(going))

    def _chosen(
        self, seqs: Sequence[Request], last: Sequence[float], gain: float, spent: float, tokens: int
    ) -> list[int]:
        """The places of the guesses for which one token more makes the step give more per second, ascending. last: the
        chance that all of each guess so far is right, 0 where it may get no more. gain: tokens that the step is
        expected to give. spent: seconds that the guesses took so far. tokens: what the step computes."""
        gains = [
            (chance * self._experiences.rate(request, NEXT), place)
            for place, (request, chance) in enumerate(zip(seqs, last, strict=True))
            if chance > 0.0
        ]
        gains.sort(key=lambda each: (-each[0], each[1]))
        speeds = [gain / (spent + self._costs.of(tokens))]
        for count, total in enumerate(accumulate(more for more, _ in gains), 1):
            speeds.append((gain + total) / (spent + self._own.of(count) + self._costs.of(tokens + count)))
        return sorted(place for _, place in gains[: speeds.index(max(speeds))])
