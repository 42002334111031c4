"""Tests which requests are drafted, given the cost of a step."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from quire.engine.common.request_params import Grammar, SamplingParams
from quire.engine.common.types import EngineCoreRequest
from quire.engine.core.drafter import Draft, Drafter, RequestsToDraft
from quire.engine.core.request import Request
from quire.engine.spec_decode.draft_length import StepCosts, choose_draft_lengths
from quire.engine.spec_decode.load_aware_drafter import MAX_DRAFTS, PROBE_INTERVAL, LoadAwareDrafter, break_even_rate

COUNTS = (1, 2, 4, 8, 16, 32, 64, 128)
FREE = StepCosts((1, 128), (1.0, 1.1))
DEAR = StepCosts((1, 128), (1.0, 128.0))


class Noted(Drafter):
    """Drafts one token for each request, and records which requests it was asked about."""

    def __init__(self) -> None:
        self.asked: list[list[str]] = []

    def propose(self, asked: RequestsToDraft, tokens: int) -> list[Draft]:
        self.asked.append([seq.engine_request.id for seq, _ in asked])
        return [Draft([int(seq.engine_request.id)]) for seq, _ in asked]


def sequences(count: int, grammar: Grammar | None = None) -> list[Request]:
    params = SamplingParams(max_tokens=100, grammar=grammar)
    requests = [EngineCoreRequest(id=str(number), prompt_ids=[5], params=params, seed=0) for number in range(count)]
    return [Request(request, number, 100, drafting=True) for number, request in enumerate(requests)]


def looked_at(drafter: LoadAwareDrafter, noted: Noted, seqs: list[Request]) -> list[str]:
    """Run one step in which no draft is accepted; return the ids of the drafted requests.

    Asserts that each draft belongs to its request.
    """
    noted.asked = [[]]
    guesses = drafter.propose([(seq, 9) for seq in seqs], len(seqs))
    looked = noted.asked[-1]
    assert [guess.token_ids for guess in guesses] == [
        [int(seq.engine_request.id)] if seq.engine_request.id in looked else [] for seq in seqs
    ]
    for seq in seqs:
        seq.token_ids.append(7)
    return looked


def test_all_are_looked_at_where_drafts_cost_little() -> None:
    noted, seqs = Noted(), sequences(20)
    drafter = LoadAwareDrafter(noted, FREE)
    assert [len(looked_at(drafter, noted, seqs)) for _ in range(5)] == [20] * 5


def test_under_load_each_is_looked_at_in_turn() -> None:
    noted, seqs = Noted(), sequences(20)
    drafter = LoadAwareDrafter(noted, DEAR)
    steps = [looked_at(drafter, noted, seqs) for _ in range(PROBE_INTERVAL)]
    assert sorted(name for step in steps for name in step) == sorted(seq.engine_request.id for seq in seqs)
    assert max(map(len, steps)) <= 1 + 20 // PROBE_INTERVAL


def test_under_load_those_are_looked_at_whose_guesses_are_tried_and_those_with_a_grammar() -> None:
    noted, seqs = Noted(), sequences(20)
    drafter = LoadAwareDrafter(noted, DEAR)
    for _ in range(PROBE_INTERVAL):
        drafter.record_acceptance(seqs[3], 1, 0)
        assert "3" in looked_at(drafter, noted, seqs)
    drafter.record_acceptance(seqs[3], 1, 1)
    drafter.forget_request(seqs[3])
    assert sum("3" in looked_at(drafter, noted, seqs) for _ in range(PROBE_INTERVAL)) == 1
    held = sequences(20, Grammar("regex", "a*"))
    assert [len(looked_at(drafter, noted, held)) for _ in range(3)] == [20] * 3


@given(
    st.integers(1, 40),
    st.integers(0, 30),
    st.lists(st.floats(0.0, 2.0), min_size=len(COUNTS), max_size=len(COUNTS)),
    st.lists(st.integers(0, 3), min_size=1, max_size=12),
    st.floats(0.1, 0.99),
)
def test_no_draft_pays_that_is_less_likely_than_the_least_chance(
    rows: int, others: int, steps: list[float], lengths: list[int], part: float
) -> None:
    costs = StepCosts(COUNTS, tuple(0.5 + sum(steps[: place + 1]) for place in range(len(COUNTS))))
    tokens = rows + others
    least = break_even_rate(rows, tokens, costs)
    chance = min(least, 1.0) * part
    chances = [[chance] * length for length in (lengths * rows)[:rows]]
    while sum(map(len, chances)) > MAX_DRAFTS:
        chances = [[], *chances[:-1]]
    assert sum(choose_draft_lengths(chances, tokens, costs)) == 0 or least < 1e-9
