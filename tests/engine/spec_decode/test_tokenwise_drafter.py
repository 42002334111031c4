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


class Says(TokenwiseDrafter):
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
            made = self._guesses[place]
            made.probabilities.append(self._chances[place][len(made.token_ids)])
            made.token_ids.append(7)


def lengths(drafter: AdaptiveTokenwiseDrafter, *seqs: Request, most: int = 100) -> list[int]:
    return [len(guess.token_ids) for guess in drafter.propose([(seq, most) for seq in seqs], len(seqs))]


def test_a_guess_goes_on_behind_what_is_likely_and_ends_behind_what_is_not() -> None:
    drafter = AdaptiveTokenwiseDrafter(Says([0.95, 0.95, 0.95, 0.05, 0.95], [0.05] * 5, [0.95] * 50), 8, COSTS, OWN)
    assert lengths(drafter, sequence([1]), sequence([2]), sequence([3]))[:2] == [4, 1]


@pytest.mark.parametrize("most", [0, 1, 3])
def test_no_guess_is_longer_than_is_useful(most: int) -> None:
    assert lengths(AdaptiveTokenwiseDrafter(Says([0.95] * 9), 8, COSTS, OWN), sequence([1]), most=most) == [most]


def test_nothing_is_asked_for_that_costs_more_than_it_can_bring() -> None:
    drafter = AdaptiveTokenwiseDrafter(Says([0.95] * 9), 8, COSTS, StepCosts((1, 64), (2.0, 2.0)))
    assert lengths(drafter, sequence([1])) == [0]


def test_what_a_drafter_says_of_itself_is_believed_as_far_as_it_was_true() -> None:
    """What one request teaches applies to all of them."""
    seq, other = sequence([1]), sequence([2])
    drafter = AdaptiveLengthDrafter(AdaptiveTokenwiseDrafter(Says([0.95] * 9), 8, COSTS, OWN), 8, COSTS)
    assert len(drafter.propose([(other, 8)], 1)[0].token_ids) > 4
    for _ in range(60):
        if count := len(drafter.propose([(seq, 8)], 1)[0].token_ids):
            drafter.record_acceptance(seq, count, 0)
    assert len(drafter.propose([(other, 8)], 1)[0].token_ids) <= 1


def test_a_drafter_that_is_too_modest_is_found_out() -> None:
    seq = sequence([1])
    drafter = AdaptiveLengthDrafter(AdaptiveTokenwiseDrafter(Says([0.35] * 9), 8, COSTS, OWN), 8, COSTS)
    assert len(drafter.propose([(seq, 8)], 1)[0].token_ids) < 3
    for _ in range(60):
        if count := len(drafter.propose([(seq, 8)], 1)[0].token_ids):
            drafter.record_acceptance(seq, count, count)
    assert len(drafter.propose([(seq, 8)], 1)[0].token_ids) > 4


def test_a_sequence_that_is_gone_leaves_nothing_behind() -> None:
    seq = sequence([1])
    drafter = AdaptiveTokenwiseDrafter(Says([0.95] * 9), 8, COSTS, OWN)
    assert lengths(drafter, seq) == [8]
    drafter.record_acceptance(seq, 8, 3)
    drafter.forget_request(seq)
    assert not drafter._pending_kinds
    assert not drafter._acceptance._rates_by_request
