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


class RecordingDrafter(Drafter):
    """Drafts one token for each request, and records which requests it was asked about."""

    def __init__(self) -> None:
        self.asked: list[list[str]] = []

    def propose(self, asked: RequestsToDraft, tokens: int) -> list[Draft]:
        self.asked.append([seq.engine_request.id for seq, _ in asked])
        return [Draft([int(seq.engine_request.id)]) for seq, _ in asked]


def make_requests(count: int, grammar: Grammar | None = None) -> list[Request]:
    params = SamplingParams(max_tokens=100, grammar=grammar)
    requests = [EngineCoreRequest(id=str(number), prompt_ids=[5], params=params, seed=0) for number in range(count)]
    return [Request(request, number, 100, drafting=True) for number, request in enumerate(requests)]


def propose_drafts(drafter: LoadAwareDrafter, noted: RecordingDrafter, seqs: list[Request]) -> list[str]:
    """Run one step in which no draft is accepted; return the ids of the drafted requests.

    Asserts that each draft belongs to its request.
    """
    noted.asked = [[]]
    drafts = drafter.propose([(seq, 9) for seq in seqs], len(seqs))
    drafted_ids = noted.asked[-1]
    assert [guess.token_ids for guess in drafts] == [
        [int(seq.engine_request.id)] if seq.engine_request.id in drafted_ids else [] for seq in seqs
    ]
    for seq in seqs:
        seq.token_ids.append(7)
    return drafted_ids


def test_all_requests_are_drafted_when_steps_are_cheap() -> None:
    recording, seqs = RecordingDrafter(), make_requests(20)
    drafter = LoadAwareDrafter(recording, FREE)
    assert [len(propose_drafts(drafter, recording, seqs)) for _ in range(5)] == [20] * 5


def test_requests_are_probed_in_turn_under_load() -> None:
    recording, seqs = RecordingDrafter(), make_requests(20)
    drafter = LoadAwareDrafter(recording, DEAR)
    steps = [propose_drafts(drafter, recording, seqs) for _ in range(PROBE_INTERVAL)]
    assert sorted(name for step in steps for name in step) == sorted(seq.engine_request.id for seq in seqs)
    assert max(map(len, steps)) <= 1 + 20 // PROBE_INTERVAL


def test_requests_with_tried_drafts_or_grammar_stay_drafted_under_load() -> None:
    recording, seqs = RecordingDrafter(), make_requests(20)
    drafter = LoadAwareDrafter(recording, DEAR)
    for _ in range(PROBE_INTERVAL):
        drafter.record_acceptance(seqs[3], 1, 0)
        assert "3" in propose_drafts(drafter, recording, seqs)
    drafter.record_acceptance(seqs[3], 1, 1)
    drafter.forget_request(seqs[3])
    assert sum("3" in propose_drafts(drafter, recording, seqs) for _ in range(PROBE_INTERVAL)) == 1
    held = make_requests(20, Grammar("regex", "a*"))
    assert [len(propose_drafts(drafter, recording, held)) for _ in range(3)] == [20] * 3


@given(
    st.integers(1, 40),
    st.integers(0, 30),
    st.lists(st.floats(0.0, 2.0), min_size=len(COUNTS), max_size=len(COUNTS)),
    st.lists(st.integers(0, 3), min_size=1, max_size=12),
    st.floats(0.1, 0.99),
)
def test_no_draft_is_chosen_below_break_even_rate(
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
