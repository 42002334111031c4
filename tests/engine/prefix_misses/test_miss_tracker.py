"""Tests what is reported about prompt tokens that were not found in the prefix cache.

Each test feeds the tracker a list of steps and says how many tokens were found cached, so that it can produce every
reason alone. tests/engine/test_misses.py uses a real engine.
"""

from __future__ import annotations

import random
import tracemalloc
from array import array
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.engine.common.request_params import SamplingParams
from quire.engine.common.types import Adapter, EngineCoreRequest, MediaSpan, PrefixMissReport
from quire.engine.core.stats import EngineStats, StepRecord
from quire.engine.prefix_misses.miss_tracker import PrefixMissTracker
from quire.engine.prefix_misses.token_diff import common_prefix_length, find_equal_runs
from tests.tiers import examples

UNIT, ROOM = 16, 10_000


class Played:
    """A miss tracker that gets one request after the other, each computed in one step of one second."""

    def __init__(self, **options: int) -> None:
        self.misses = PrefixMissTracker(2, **options)
        self._number = 0

    def begin(
        self, request: EngineCoreRequest, cached: int, *, engine: int = 0, weights: str = "1", until: int = 0
    ) -> None:
        self.misses.add_requests([request])
        self.step(request, cached, (until or len(request.prompt_ids)) - cached, engine=engine, weights=weights)

    def step(self, request: EngineCoreRequest, start: int, count: int, *, engine: int = 0, weights: str = "1") -> None:
        record = StepRecord(1, 0.0, 0.0, 1.0, 1.0, 1, count, ((request.id, start, count),), ())
        self.misses.track_step(record, engine, EngineStats(prefix_unit=UNIT, cache_tokens=ROOM), weights)

    def end(self, request: EngineCoreRequest, answer: Sequence[int] = (7, 7)) -> PrefixMissReport:
        found = self.misses.get_request_report(request.id)
        assert found is not None
        self.misses.finish_request(request.id, answer)
        return found

    def ask(
        self, prompt: Sequence[int], cached: int = 0, *, answer: Sequence[int] = (7, 7), engine: int = 0, **more: object
    ) -> PrefixMissReport:
        weights = str(more.pop("weights", "1"))
        made = self.request(prompt, **more)
        self.begin(made, cached, engine=engine, weights=weights)
        return self.end(made, answer)

    def request(self, prompt: Sequence[int], **more: object) -> EngineCoreRequest:
        self._number += 1
        params = more.pop("params", SamplingParams())
        return EngineCoreRequest(id=f"r{self._number}", prompt_ids=list(prompt), params=params, seed=0, **more)


def joined(parts: Sequence[list[int]]) -> list[int]:
    return [token for part in parts for token in part]


def text(seed: int, count: int) -> list[int]:
    return random.Random(seed).choices(range(10, 30_000), k=count)


def test_a_first_prompt_misses_nothing_and_its_next_turn_that_is_found_neither() -> None:
    played = Played()
    first = played.ask(text(1, 200), answer=text(2, 50))
    assert (first.tokens_by_reason, first.turn, first.nearest) == ([], 1, None)
    again = played.ask(text(1, 200) + text(2, 50) + text(3, 30), cached=240)
    assert (again.tokens_by_reason, again.turn, again.conversation) == ([], 2, first.conversation)
    other = played.ask(text(4, 200))
    assert (other.tokens_by_reason, other.turn, other.conversation) == ([], 1, "r3")


def test_tokens_that_were_there_and_are_not_found_were_evicted() -> None:
    played = Played()
    prompt = text(1, 200)
    played.ask(prompt)
    report = played.ask(prompt + text(2, 40))
    assert (report.tokens_by_reason, report.own_load) == ([("evicted", 192)], False)
    assert report.compute_seconds == pytest.approx(192 / 240)
    part = played.ask(prompt + text(2, 40) + text(3, 9), cached=96)
    assert part.tokens_by_reason == [("evicted", 240 - 96)]
    played.ask(text(5, ROOM))
    own = played.ask(prompt)
    assert (own.tokens_by_reason, own.own_load) == ([("evicted", 192)], True)
    whole = played.ask(prompt, cached=192)
    assert whole.tokens_by_reason == [], "the last token is computed in any case"


def test_what_another_request_is_computing_is_not_there_yet_and_what_was_never_computed_never_was() -> None:
    played = Played()
    prompt = text(1, 400)
    first = played.request(prompt)
    played.begin(first, 0, until=128)
    assert played.ask(prompt, cached=128).tokens_by_reason == [("computing", 384 - 128)]
    played.misses.finish_request(first.id, [])
    played = Played()
    aborted = played.request(prompt)
    played.begin(aborted, 0, until=128)
    played.misses.finish_request(aborted.id, [])
    assert played.ask(prompt).tokens_by_reason == [("evicted", 128)]


def test_other_salts_adapters_weights_replicas_and_engines() -> None:
    prompt = text(1, 200)
    played = Played()
    played.ask(prompt, tenant="a", cache_salt="k/one")
    assert played.ask(prompt, tenant="a", cache_salt="k/two").tokens_by_reason == [("cache_salt", 192)]
    played = Played()
    played.ask(prompt, adapter=Adapter("x", "ab", ""))
    assert played.ask(prompt).tokens_by_reason == [("adapter", 192)]
    played = Played()
    played.ask(prompt)
    assert played.ask(prompt, weights="2").tokens_by_reason == [("weights", 192)]
    played = Played()
    played.ask(prompt)
    assert played.ask(prompt, engine=1).tokens_by_reason == [("replica", 192)]
    played = Played()
    played.ask(prompt)
    played.misses.record_cache_reset(0)
    assert played.ask(prompt).tokens_by_reason == [("restarted", 192)]
    played.ask(prompt, cached=192)
    asked = played.request(prompt, params=SamplingParams(prompt_logprobs=1))
    played.begin(asked, 0)
    assert played.end(asked).tokens_by_reason == [("prompt_logprobs", 192)]


def test_nothing_is_said_of_other_tenants_nor_without_keys_of_other_salts() -> None:
    prompt = text(1, 200)
    played = Played()
    played.ask(prompt, tenant="a", cache_salt="a/")
    report = played.ask(prompt[:100] + text(2, 100), tenant="b", cache_salt="b/")
    assert (report.tokens_by_reason, report.nearest, report.turn) == ([], None, 1)
    played.ask(prompt, cache_salt="one")
    report = played.ask(prompt[:100] + text(2, 100), cache_salt="two")
    assert (report.tokens_by_reason, report.nearest, report.turn) == ([], None, 1)


def test_a_date_before_the_conversation_moves_all_of_it() -> None:
    played = Played()
    system, history, answer = text(1, 40), text(2, 500), text(3, 60)
    played.ask([*system, 1, 2, *history], answer=answer)
    report = played.ask([*system, 1, 3, *history, *answer, *text(4, 30)], cached=32)
    assert report.tokens_by_reason == [("rewritten", 560)]
    assert (report.turn, report.conversation) == (2, "r1")
    nearest = report.nearest
    assert nearest is not None
    assert (nearest.num_common, nearest.diverges_in) == (41, "prompt")
    assert (nearest.common_ids[-1], nearest.earlier_ids[0], nearest.prompt_ids[0]) == (1, 2, 3)


def test_another_conversation_with_the_same_tools_behind_another_date_diverged() -> None:
    played = Played()
    tools = text(1, 600)
    played.ask([*text(9, 20), 1, *tools, *text(2, 100)])
    report = played.ask([*text(9, 20), 2, *tools, *text(3, 100)], cached=16)
    assert report.tokens_by_reason == [("diverged", 600)]
    assert (report.turn, report.conversation) == (1, "r2")


def test_tools_in_another_order_are_found_wherever_they_stand() -> None:
    played = Played()
    tools = [text(seed, 80) for seed in range(20, 26)]
    rest = text(2, 300)
    played.ask(joined(tools) + rest)
    shuffled = [tools[index] for index in (0, 3, 1, 5, 4, 2)]
    report = played.ask(joined(shuffled) + rest + text(3, 30), cached=80)
    assert report.tokens_by_reason == [("rewritten", 5 * 80 + 300)]


def test_thoughts_that_are_dropped_rewrite_the_answer() -> None:
    played = Played()
    prompt, thoughts, said = text(1, 150), text(2, 700), text(3, 120)
    played.ask(prompt, answer=[*thoughts, *said])
    report = played.ask([*prompt, *said, *text(4, 50)], cached=144)
    assert report.tokens_by_reason == [("rewritten", 120)]
    assert report.nearest is not None
    assert (report.nearest.num_common, report.nearest.diverges_in, report.turn) == (150, "answer", 2)


def test_a_prompt_that_goes_on_otherwise_with_nothing_moved_has_no_miss_but_says_where() -> None:
    played = Played()
    system = text(1, 130)
    played.ask(system + text(2, 80))
    report = played.ask(system + text(3, 80), cached=128)
    assert report.tokens_by_reason == []
    assert report.nearest is not None
    assert report.nearest.num_common == 130


def test_choices_of_one_call_are_one_turn() -> None:
    played = Played()
    prompt = text(1, 100)
    both = [played.request(prompt), played.request(prompt)]
    played.misses.add_requests(both)
    for each, cached in zip(both, (0, 96), strict=True):
        played.step(each, cached, 100 - cached)
    assert [played.end(each).turn for each in both] == [1, 1]
    assert played.ask([*prompt, 7, 7, 7], cached=96).turn == 2


def test_a_first_prompt_that_is_asked_again_is_a_first_turn() -> None:
    """Two users may send the same first message, and one user may ask for another answer."""
    played = Played()
    first, answer, more = text(1, 100), text(2, 40), text(3, 30)
    played.ask(first, answer=answer)
    again = played.ask(first, cached=96, answer=answer)
    assert (again.turn, again.conversation) == (1, "r2")
    second = played.ask([*first, *answer, *more], cached=128)
    assert (second.turn, second.conversation) == (2, "r2")
    other_answer = played.ask([*first, *answer, *more], cached=160)
    assert (other_answer.turn, other_answer.conversation) == (2, "r2")


def test_a_first_prompt_behind_another_date_is_a_first_turn() -> None:
    played = Played()
    message = text(1, 200)
    played.ask([*text(9, 20), 1, *message])
    again = played.ask([*text(9, 20), 2, *message], cached=16)
    assert (again.turn, again.conversation) == (1, "r2")
    assert [reason for reason, _ in again.tokens_by_reason] == ["rewritten"]


def test_an_answer_is_no_end_of_a_prompt() -> None:
    """A prompt that ends where an earlier answer ended is the next turn of that conversation."""
    played = Played()
    prompt, thoughts, answer = text(1, 150), text(2, 100), text(3, 120)
    played.ask(prompt, answer=[*thoughts, *answer])
    report = played.ask([*prompt, *answer], cached=144)
    assert report.turn == 2


def test_a_request_of_an_engine_that_died_is_looked_at_again() -> None:
    played = Played()
    prompt = text(1, 200)
    played.ask(prompt)
    asked = played.request(prompt)
    played.begin(asked, 192)
    played.misses.record_engine_loss(0, [asked.id])
    played.step(asked, 0, 200)
    assert played.end(asked).tokens_by_reason == [("restarted", 192)]


def test_images_are_known_by_what_they_show() -> None:
    played = Played()
    prompt = [*text(1, 70), *[5] * 64, *text(2, 100)]
    played.ask(prompt, spans=(MediaSpan(70, 64, b"a" * 16),))
    same = played.ask(prompt, spans=(MediaSpan(70, 64, b"a" * 16),))
    assert same.tokens_by_reason == [("evicted", 224)]
    other = played.ask(prompt, spans=(MediaSpan(70, 64, b"b" * 16),), cached=64)
    assert other.nearest is not None
    assert (other.tokens_by_reason, other.nearest.num_common, other.nearest.earlier_ids) == (
        [("rewritten", 100)],
        70,
        [],
    )


def test_an_engine_without_a_prefix_cache_is_not_looked_at() -> None:
    misses = PrefixMissTracker(1)
    made = Played().request(text(1, 100))
    misses.add_requests([made])
    misses.track_step(StepRecord(1, 0, 0, 1, 1, 1, 100, ((made.id, 0, 100),), ()), 0, EngineStats(), "1")
    assert misses.get_request_report(made.id) is None
    misses.finish_request(made.id, [])


def test_memory_keeps_to_its_bounds_and_forgets_what_is_old() -> None:
    tracemalloc.start()
    try:
        played = Played(max_tenant_bytes=1 << 17, max_total_bytes=3 << 17)
        before = tracemalloc.get_traced_memory()[0]
        for number in range(40):
            played.ask(text(number, 2000), tenant=f"t{number % 5}", cache_salt="x", answer=text(-number, 100))
            assert played.misses.total_bytes <= 3 << 17
        used = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert used < 3 << 17, "the estimate of a piece is too low"
    assert used > 3 << 16, "the estimate is far too high"
    assert played.ask(text(39, 2000), tenant="t4", cache_salt="x").tokens_by_reason == [("evicted", 1984)]
    assert played.ask(text(4, 2000), tenant="t4", cache_salt="x").tokens_by_reason == [], "forgotten"


PIECES = st.lists(st.sampled_from([text(seed, 24) for seed in range(8)]), max_size=8)


@given(PIECES, PIECES)
@settings(max_examples=examples(120), deadline=None)
def test_equal_pieces_are_equal_and_apart(old: list[list[int]], new: list[list[int]]) -> None:
    one, other = joined(old), joined(new)
    found = find_equal_runs(array("i", one).tobytes(), array("i", other).tobytes())
    covered: set[int] = set()
    for piece in found:
        assert (
            one[piece.old_start : piece.old_start + piece.length]
            == other[piece.new_start : piece.new_start + piece.length]
        )
        places = set(range(piece.new_start, piece.new_start + piece.length))
        assert len(places) == piece.length >= 16
        assert not places & covered
        covered |= places
    if one and one == other:
        assert len(covered) == len(one) or len(set(map(tuple, old))) < len(old)
    prefix = common_prefix_length(array("i", one).tobytes(), array("i", other).tobytes())
    assert one[:prefix] == other[:prefix]
    assert one[prefix : prefix + 1] != other[prefix : prefix + 1] or prefix == min(len(one), len(other))


STEPS = st.lists(
    st.tuples(st.integers(0, 2), st.integers(0, 400), st.integers(0, 3), st.integers(0, 25), st.integers(0, 60)),
    max_size=25,
)


@given(STEPS)
@settings(max_examples=examples(100), deadline=None)
def test_never_more_is_missed_than_was_computed(steps: list[tuple[int, int, int, int, int]]) -> None:
    """For any requests in any order: missed tokens are among the computed ones, all counts are positive, and the tree's
    usage order holds (the tracker asserts this when it evicts).
    """
    played = Played(max_tenant_bytes=20_000, max_total_bytes=40_000)
    for seed, count, tenant, cached, answer in steps:
        prompt = text(seed, count)[: count // 2] + text(seed + (count % 3), count) + [3]
        found = min(cached * UNIT, (len(prompt) - 1) // UNIT * UNIT)
        report = played.ask(prompt, found, answer=text(9, answer), tenant=f"t{tenant}")
        assert 0 <= report.num_missed_tokens <= len(prompt) - found
        assert all(tokens > 0 for _, tokens in report.tokens_by_reason)
        assert played.misses.total_bytes <= 40_000
