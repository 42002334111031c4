"""Tests the chosen draft lengths against every other choice."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.engine.core.drafter import Draft, Drafter, RequestsToDraft
from quire.engine.core.request import Request
from quire.engine.spec_decode.draft_length import AdaptiveLengthDrafter, StepCosts, choose_draft_lengths
from tests.engine.spec_decode.test_ngram_drafter import sequence

RATES = st.floats(0.01, 0.99)
STEPS = st.lists(st.floats(0.0, 2.0), min_size=7, max_size=7)


@given(st.lists(st.tuples(st.integers(0, 3), RATES), min_size=1, max_size=3), st.integers(0, 70), STEPS, RATES)
def test_chosen_draft_lengths_maximize_tokens_per_second(
    asked: list[tuple[int, float]], others: int, steps: list[float], each: float
) -> None:
    counts = (1, 2, 4, 8, 16, 32, 64)
    costs = StepCosts(counts, tuple(0.5 + sum(steps[: place + 1]) for place in range(7)))
    lengths, rates = [length for length, _ in asked], [rate for _, rate in asked]
    tokens = len(asked) + others

    def speed(choice: tuple[int, ...]) -> float:
        gain = sum(sum(rate ** (place + 1) for place in range(n)) for n, rate in zip(choice, rates, strict=True))
        return (len(asked) + gain) / (costs.estimate_seconds(tokens + sum(choice)) + each * sum(choice))

    best = max(map(speed, product(*(range(length + 1) for length in lengths))))
    chances = [[rate ** (place + 1) for place in range(length)] for length, rate in asked]
    assert abs(speed(tuple(choose_draft_lengths(chances, tokens, costs, each))) - best) <= 1e-9 * best


def test_step_costs_interpolate_linearly() -> None:
    costs = StepCosts((1, 4, 8), (1.0, 1.6, 4.0))
    assert [costs.estimate_seconds(tokens) for tokens in (1, 2, 4, 6, 8, 10)] == pytest.approx(
        [1.0, 1.2, 1.6, 2.8, 4.0, 5.2]
    )


class SixTokenDrafter(Drafter):
    """Always proposes six draft tokens."""

    def propose(self, asked: RequestsToDraft, tokens: int) -> list[Draft]:
        return [Draft([1] * min(6, most)) for _, most in asked]


def draft_length(adaptive: AdaptiveLengthDrafter, seq: Request) -> int:
    return len(adaptive.propose([(seq, 100)], 1)[0].token_ids)


@pytest.mark.parametrize("own", [None, StepCosts((1, 64), (0.1, 1.0))])
def test_rejected_drafts_stop_and_are_probed_again(own: StepCosts | None) -> None:
    adaptive, seq = AdaptiveLengthDrafter(SixTokenDrafter(), 4, StepCosts((1, 64), (1.0, 20.0)), own), sequence([1, 2])
    history = []
    for _ in range(600):
        history.append(count := draft_length(adaptive, seq))
        if count:
            adaptive.record_acceptance(seq, count, 0)
    assert history[0] > 0
    assert 0 < sum(count > 0 for count in history[20:]) < 60


def test_accepted_drafts_reach_maximum_length() -> None:
    adaptive, seq = AdaptiveLengthDrafter(SixTokenDrafter(), 4, StepCosts((1, 64), (1.0, 20.0))), sequence([1, 2])
    for _ in range(20):
        draft_length(adaptive, seq)
        adaptive.record_acceptance(seq, 2, 2)
    assert draft_length(adaptive, seq) == 4
