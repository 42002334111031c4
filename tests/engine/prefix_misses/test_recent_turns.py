"""Tests that the remembered last turns are found by session and stay within their memory bounds per tenant and in
total.
"""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from quire.engine.common.request_params import SamplingParams
from quire.engine.common.types import EngineCoreRequest, MediaSpan
from quire.engine.prefix_misses.recent_turns import LastSessionTurns
from tests.tiers import examples


def make_request(name: str, count: int, tenant: str = "", **more: object) -> EngineCoreRequest:
    ids = list(range(count))
    return EngineCoreRequest(
        id="x", prompt_ids=ids, params=SamplingParams(), seed=0, session=name, tenant=tenant, **more
    )


def test_last_turn_is_found_by_cache_salt_and_session() -> None:
    turns = LastSessionTurns()
    turns.record_turn(make_request("a", 3), [7])
    turns.record_turn(make_request("a", 5, cache_salt="s"), [8, 9])
    turns.record_turn(make_request("", 5), [8, 9])
    turns.record_turn(make_request("image", 5, spans=(MediaSpan(0, 1, b"x"),)), [])
    assert turns.find_session_turn("", "", "a").token_ids == [0, 1, 2, 7]
    assert turns.find_session_turn("", "s", "a").token_ids == [0, 1, 2, 3, 4, 8, 9]
    assert turns.find_session_turn("", "", "") is turns.find_session_turn("", "", "image") is None
    turns.record_turn(make_request("a", 9), [])
    assert turns.find_session_turn("", "", "a").token_ids == list(range(9))
    turns.record_turn(make_request("a", 5, spans=(MediaSpan(0, 1, b"x"),)), [])
    assert turns.find_session_turn("", "", "a") is None, "the turn before it is not its last"
    assert turns.find_session_turn("", "s", "a") is not None


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 3), st.integers(0, 900)), max_size=80))
@settings(max_examples=examples(100), deadline=None)
def test_last_turns_stay_within_memory_bounds(asked: list[tuple[int, int, int]]) -> None:
    turns = LastSessionTurns(max_tenant_bytes=4000, max_total_bytes=8000)
    for name, tenant, count in asked:
        turns.record_turn(make_request(f"{name}/{tenant}", count, f"t{tenant}"), [])
        assert turns.total_bytes <= 8000
        fits = 4 * count + 500 <= 4000
        assert (
            (turns.find_session_turn(f"t{tenant}", "", f"{name}/{tenant}") is not None)
            or not fits
            or turns.total_bytes > 4000
        )
