"""Tests that drafts made token by token end where one more token would not pay."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from quire.engine.core.drafter import Draft, RequestsToDraft, TokenwiseDrafter
from quire.engine.core.request import Request
from quire.engine.spec_decode.draft_length import AdaptiveLengthDrafter, StepCosts
from quire.engine.spec_decode.tokenwise_drafter import AdaptiveTokenwiseDrafter
from tests.engine.spec_decode.test_ngram_drafter import sequence

COSTS = StepCosts((1, 64), (1.0, 3.0))
OWN = StepCosts((1, 64), (0.05, 0.1))


class FixedProbabilityDrafter(TokenwiseDrafter):
    """Drafts the same token always, with probabilities given by request and position."""

    def __init__(self, *chances: Sequence[float]) -> None:
        self._chances = chances
        self._guesses: list[Draft] = []
        self._may_go_on: set[int] = set()

    def draft_first_tokens(self, asked: RequestsToDraft) -> list[Draft]:
        self._guesses = [Draft([], probabilities=[]) for _ in asked]
        self._may_go_on = {place for place, (_, most) in enumerate(asked) if most > 0}
        self.draft_next_tokens(sorted(self._may_go_on))
        return self._guesses

    def draft_next_tokens(self, places: Sequence[int]) -> None:
        assert list(places) == sorted(self._may_go_on.intersection(places)), "a guess that had ended"
        self._may_go_on = set(places)
        for place in places:
            draft = self._guesses[place]
            draft.probabilities.append(self._chances[place][len(draft.token_ids)])
            draft.token_ids.append(7)


def draft_lengths(drafter: AdaptiveTokenwiseDrafter, *seqs: Request, most: int = 100) -> list[int]:
    return [len(guess.token_ids) for guess in drafter.propose([(request, most) for request in seqs], len(seqs))]


def test_draft_continues_while_tokens_are_likely() -> None:
    drafter = AdaptiveTokenwiseDrafter(
        FixedProbabilityDrafter([0.95, 0.95, 0.95, 0.05, 0.95], [0.05] * 5, [0.95] * 50), 8, COSTS, OWN
    )
    assert draft_lengths(drafter, sequence([1]), sequence([2]), sequence([3]))[:2] == [4, 1]


@pytest.mark.parametrize("most", [0, 1, 3])
def test_draft_is_no_longer_than_useful_tokens(most: int) -> None:
    assert draft_lengths(
        AdaptiveTokenwiseDrafter(FixedProbabilityDrafter([0.95] * 9), 8, COSTS, OWN), sequence([1]), most=most
    ) == [most]


def test_nothing_is_drafted_when_drafting_costs_too_much() -> None:
    drafter = AdaptiveTokenwiseDrafter(FixedProbabilityDrafter([0.95] * 9), 8, COSTS, StepCosts((1, 64), (2.0, 2.0)))
    assert draft_lengths(drafter, sequence([1])) == [0]


def test_rejections_shorten_drafts_of_overconfident_drafter() -> None:
    """What one request teaches applies to all of them."""
    request, other = sequence([1]), sequence([2])
    drafter = AdaptiveLengthDrafter(
        AdaptiveTokenwiseDrafter(FixedProbabilityDrafter([0.95] * 9), 8, COSTS, OWN), 8, COSTS
    )
    assert len(drafter.propose([(other, 8)], 1)[0].token_ids) > 4
    for _ in range(60):
        if count := len(drafter.propose([(request, 8)], 1)[0].token_ids):
            drafter.record_acceptance(request, count, 0)
    assert len(drafter.propose([(other, 8)], 1)[0].token_ids) <= 1


def test_acceptances_lengthen_drafts_of_underconfident_drafter() -> None:
    request = sequence([1])
    drafter = AdaptiveLengthDrafter(
        AdaptiveTokenwiseDrafter(FixedProbabilityDrafter([0.35] * 9), 8, COSTS, OWN), 8, COSTS
    )
    assert len(drafter.propose([(request, 8)], 1)[0].token_ids) < 3
    for _ in range(60):
        if count := len(drafter.propose([(request, 8)], 1)[0].token_ids):
            drafter.record_acceptance(request, count, count)
    assert len(drafter.propose([(request, 8)], 1)[0].token_ids) > 4


def test_forget_request_removes_acceptance_state() -> None:
    request = sequence([1])
    drafter = AdaptiveTokenwiseDrafter(FixedProbabilityDrafter([0.95] * 9), 8, COSTS, OWN)
    assert draft_lengths(drafter, request) == [8]
    drafter.record_acceptance(request, 8, 3)
    drafter.forget_request(request)
    assert not drafter._pending_kinds
    assert not drafter._acceptance._rates_by_request
