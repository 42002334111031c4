"""What an engine counts."""

from __future__ import annotations

from quire.engine.core.stats import LiveCounters


def test_counters_are_zero_when_nothing_has_run() -> None:
    assert not any(LiveCounters().as_dict().values())


def test_accepted_drafts_are_counted_by_position_when_lengths_differ() -> None:
    counters = LiveCounters()
    counters.count_drafts([0], accepted=1)
    before = counters.accepted_drafts
    counters.count_drafts([2, 0, 1, 1], accepted=2)
    counters.count_drafts([1, 1], accepted=0)
    assert counters.accepted_drafts == [2, 1, 0, 0]
    assert (counters.drafts, counters.draft_tokens) == (3, 7)
    assert counters.draft_tokens_by_source == [2, 4, 1]
    assert counters.accepted_by_source == [2, 0, 1]
    assert before == [1], "earlier stats hold this list"


def test_captured_steps_count_prefill_apart_when_they_have_some() -> None:
    counters = LiveCounters()
    for has_prefill in (False, True, False):
        counters.count_cuda_graph_step(has_prefill=has_prefill)
    assert (counters.captured_steps, counters.captured_prompt_steps) == (3, 1)
