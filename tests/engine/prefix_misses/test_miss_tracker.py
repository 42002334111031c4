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
from hypothesis import example, given, settings
from hypothesis import strategies as st

from quire.engine.common.request_params import SamplingParams
from quire.engine.common.types import Adapter, EngineCoreRequest, MediaSpan, PrefixMissReport
from quire.engine.core.stats import EngineStats, StepRecord
from quire.engine.prefix_misses.miss_tracker import PrefixMissTracker
from quire.engine.prefix_misses.token_diff import common_prefix_length, find_equal_runs
from tests.tiers import examples

UNIT, ROOM = 16, 10_000


class TrackedRequests:
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
        report = self.misses.get_request_report(request.id)
        assert report is not None
        self.misses.finish_request(request.id, answer)
        return report

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


def concatenate(parts: Sequence[list[int]]) -> list[int]:
    return [token for part in parts for token in part]


def random_token_ids(seed: int, count: int) -> list[int]:
    return random.Random(seed).choices(range(10, 30_000), k=count)


def test_first_turn_and_cached_next_turn_have_no_miss() -> None:
    tracked = TrackedRequests()
    first = tracked.ask(random_token_ids(1, 200), answer=random_token_ids(2, 50))
    assert (first.tokens_by_reason, first.turn, first.nearest) == ([], 1, None)
    again = tracked.ask(random_token_ids(1, 200) + random_token_ids(2, 50) + random_token_ids(3, 30), cached=240)
    assert (again.tokens_by_reason, again.turn, again.conversation) == ([], 2, first.conversation)
    other = tracked.ask(random_token_ids(4, 200))
    assert (other.tokens_by_reason, other.turn, other.conversation) == ([], 1, "r3")


def test_formerly_cached_tokens_are_reported_as_evicted() -> None:
    tracked = TrackedRequests()
    prompt = random_token_ids(1, 200)
    tracked.ask(prompt)
    report = tracked.ask(prompt + random_token_ids(2, 40))
    assert (report.tokens_by_reason, report.own_load) == ([("evicted", 192)], False)
    assert report.compute_seconds == pytest.approx(192 / 240)
    part = tracked.ask(prompt + random_token_ids(2, 40) + random_token_ids(3, 9), cached=96)
    assert part.tokens_by_reason == [("evicted", 240 - 96)]
    tracked.ask(random_token_ids(5, ROOM))
    own = tracked.ask(prompt)
    assert (own.tokens_by_reason, own.own_load) == ([("evicted", 192)], True)
    whole = tracked.ask(prompt, cached=192)
    assert whole.tokens_by_reason == [], "the last token is computed in any case"


def test_tokens_being_computed_by_other_request_are_miss_reason() -> None:
    tracked = TrackedRequests()
    prompt = random_token_ids(1, 400)
    first = tracked.request(prompt)
    tracked.begin(first, 0, until=128)
    assert tracked.ask(prompt, cached=128).tokens_by_reason == [("computing", 384 - 128)]
    tracked.misses.finish_request(first.id, [])
    tracked = TrackedRequests()
    aborted = tracked.request(prompt)
    tracked.begin(aborted, 0, until=128)
    tracked.misses.finish_request(aborted.id, [])
    assert tracked.ask(prompt).tokens_by_reason == [("evicted", 128)]


def test_salt_adapter_weights_and_replica_changes_are_miss_reasons() -> None:
    prompt = random_token_ids(1, 200)
    tracked = TrackedRequests()
    tracked.ask(prompt, tenant="a", cache_salt="k/one")
    assert tracked.ask(prompt, tenant="a", cache_salt="k/two").tokens_by_reason == [("cache_salt", 192)]
    tracked = TrackedRequests()
    tracked.ask(prompt, adapter=Adapter("x", "ab", ""))
    assert tracked.ask(prompt).tokens_by_reason == [("adapter", 192)]
    tracked = TrackedRequests()
    tracked.ask(prompt)
    assert tracked.ask(prompt, weights="2").tokens_by_reason == [("weights", 192)]
    tracked = TrackedRequests()
    tracked.ask(prompt)
    assert tracked.ask(prompt, engine=1).tokens_by_reason == [("replica", 192)]
    tracked = TrackedRequests()
    tracked.ask(prompt)
    tracked.misses.record_cache_reset(0)
    assert tracked.ask(prompt).tokens_by_reason == [("restarted", 192)]
    tracked.ask(prompt, cached=192)
    request = tracked.request(prompt, params=SamplingParams(prompt_logprobs=1))
    tracked.begin(request, 0)
    assert tracked.end(request).tokens_by_reason == [("prompt_logprobs", 192)]


def test_report_hides_prompts_of_other_tenants_and_salts() -> None:
    prompt = random_token_ids(1, 200)
    tracked = TrackedRequests()
    tracked.ask(prompt, tenant="a", cache_salt="a/")
    report = tracked.ask(prompt[:100] + random_token_ids(2, 100), tenant="b", cache_salt="b/")
    assert (report.tokens_by_reason, report.nearest, report.turn) == ([], None, 1)
    tracked.ask(prompt, cache_salt="one")
    report = tracked.ask(prompt[:100] + random_token_ids(2, 100), cache_salt="two")
    assert (report.tokens_by_reason, report.nearest, report.turn) == ([], None, 1)


def test_changed_date_before_history_is_reported_as_rewritten() -> None:
    tracked = TrackedRequests()
    system, history, answer = random_token_ids(1, 40), random_token_ids(2, 500), random_token_ids(3, 60)
    tracked.ask([*system, 1, 2, *history], answer=answer)
    report = tracked.ask([*system, 1, 3, *history, *answer, *random_token_ids(4, 30)], cached=32)
    assert report.tokens_by_reason == [("rewritten", 560)]
    assert (report.turn, report.conversation) == (2, "r1")
    nearest = report.nearest
    assert nearest is not None
    assert (nearest.num_common, nearest.diverges_in) == (41, "prompt")
    assert (nearest.common_ids[-1], nearest.earlier_ids[0], nearest.prompt_ids[0]) == (1, 2, 3)


def test_new_conversation_after_changed_date_is_reported_as_diverged() -> None:
    tracked = TrackedRequests()
    tools = random_token_ids(1, 600)
    tracked.ask([*random_token_ids(9, 20), 1, *tools, *random_token_ids(2, 100)])
    report = tracked.ask([*random_token_ids(9, 20), 2, *tools, *random_token_ids(3, 100)], cached=16)
    assert report.tokens_by_reason == [("diverged", 600)]
    assert (report.turn, report.conversation) == (1, "r2")


def test_reordered_tools_are_reported_as_rewritten() -> None:
    tracked = TrackedRequests()
    tools = [random_token_ids(seed, 80) for seed in range(20, 26)]
    rest = random_token_ids(2, 300)
    tracked.ask(concatenate(tools) + rest)
    shuffled = [tools[index] for index in (0, 3, 1, 5, 4, 2)]
    report = tracked.ask(concatenate(shuffled) + rest + random_token_ids(3, 30), cached=80)
    assert report.tokens_by_reason == [("rewritten", 5 * 80 + 300)]


def test_dropped_reasoning_is_reported_as_rewritten_answer() -> None:
    tracked = TrackedRequests()
    prompt, thoughts, answer = random_token_ids(1, 150), random_token_ids(2, 700), random_token_ids(3, 120)
    tracked.ask(prompt, answer=[*thoughts, *answer])
    report = tracked.ask([*prompt, *answer, *random_token_ids(4, 50)], cached=144)
    assert report.tokens_by_reason == [("rewritten", 120)]
    assert report.nearest is not None
    assert (report.nearest.num_common, report.nearest.diverges_in, report.turn) == (150, "answer", 2)


def test_new_suffix_has_no_miss_but_reports_divergence() -> None:
    tracked = TrackedRequests()
    system = random_token_ids(1, 130)
    tracked.ask(system + random_token_ids(2, 80))
    report = tracked.ask(system + random_token_ids(3, 80), cached=128)
    assert report.tokens_by_reason == []
    assert report.nearest is not None
    assert report.nearest.num_common == 130


def test_choices_of_request_count_as_single_turn() -> None:
    tracked = TrackedRequests()
    prompt = random_token_ids(1, 100)
    both = [tracked.request(prompt), tracked.request(prompt)]
    tracked.misses.add_requests(both)
    for each, cached in zip(both, (0, 96), strict=True):
        tracked.step(each, cached, 100 - cached)
    assert [tracked.end(each).turn for each in both] == [1, 1]
    assert tracked.ask([*prompt, 7, 7, 7], cached=96).turn == 2


def test_repeated_first_prompt_starts_new_conversation() -> None:
    """Two users may send the same first message, and one user may ask for another answer."""
    tracked = TrackedRequests()
    first, answer, more = random_token_ids(1, 100), random_token_ids(2, 40), random_token_ids(3, 30)
    tracked.ask(first, answer=answer)
    again = tracked.ask(first, cached=96, answer=answer)
    assert (again.turn, again.conversation) == (1, "r2")
    second = tracked.ask([*first, *answer, *more], cached=128)
    assert (second.turn, second.conversation) == (2, "r2")
    other_answer = tracked.ask([*first, *answer, *more], cached=160)
    assert (other_answer.turn, other_answer.conversation) == (2, "r2")


def test_first_prompt_after_changed_date_starts_new_conversation() -> None:
    tracked = TrackedRequests()
    message = random_token_ids(1, 200)
    tracked.ask([*random_token_ids(9, 20), 1, *message])
    again = tracked.ask([*random_token_ids(9, 20), 2, *message], cached=16)
    assert (again.turn, again.conversation) == (1, "r2")
    assert [reason for reason, _ in again.tokens_by_reason] == ["rewritten"]


def test_prompt_ending_at_earlier_answer_is_next_turn() -> None:
    """A prompt that ends where an earlier answer ended is the next turn of that conversation."""
    tracked = TrackedRequests()
    prompt, thoughts, answer = random_token_ids(1, 150), random_token_ids(2, 100), random_token_ids(3, 120)
    tracked.ask(prompt, answer=[*thoughts, *answer])
    report = tracked.ask([*prompt, *answer], cached=144)
    assert report.turn == 2


def test_request_replayed_after_engine_loss_reports_restart() -> None:
    tracked = TrackedRequests()
    prompt = random_token_ids(1, 200)
    tracked.ask(prompt)
    request = tracked.request(prompt)
    tracked.begin(request, 192)
    tracked.misses.record_engine_loss(0, [request.id])
    tracked.step(request, 0, 200)
    assert tracked.end(request).tokens_by_reason == [("restarted", 192)]


def test_media_spans_are_compared_by_content_digest() -> None:
    tracked = TrackedRequests()
    prompt = [*random_token_ids(1, 70), *[5] * 64, *random_token_ids(2, 100)]
    tracked.ask(prompt, spans=(MediaSpan(70, 64, b"a" * 16),))
    same = tracked.ask(prompt, spans=(MediaSpan(70, 64, b"a" * 16),))
    assert same.tokens_by_reason == [("evicted", 224)]
    other = tracked.ask(prompt, spans=(MediaSpan(70, 64, b"b" * 16),), cached=64)
    assert other.nearest is not None
    assert (other.tokens_by_reason, other.nearest.num_common, other.nearest.earlier_ids) == (
        [("rewritten", 100)],
        70,
        [],
    )


def test_engine_without_prefix_cache_gets_no_report() -> None:
    misses = PrefixMissTracker(1)
    request = TrackedRequests().request(random_token_ids(1, 100))
    misses.add_requests([request])
    misses.track_step(StepRecord(1, 0, 0, 1, 1, 1, 100, ((request.id, 0, 100),), ()), 0, EngineStats(), "1")
    assert misses.get_request_report(request.id) is None
    misses.finish_request(request.id, [])


def test_tracker_memory_is_bounded_and_oldest_prompts_are_evicted() -> None:
    tracemalloc.start()
    try:
        tracked = TrackedRequests(max_tenant_bytes=1 << 17, max_total_bytes=3 << 17)
        before = tracemalloc.get_traced_memory()[0]
        for number in range(40):
            tracked.ask(
                random_token_ids(number, 2000),
                tenant=f"t{number % 5}",
                cache_salt="x",
                answer=random_token_ids(-number, 100),
            )
            assert tracked.misses.total_bytes <= 3 << 17
        used = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert used < 3 << 17, "the estimate of a piece is too low"
    assert used > 3 << 16, "the estimate is far too high"
    assert tracked.ask(random_token_ids(39, 2000), tenant="t4", cache_salt="x").tokens_by_reason == [("evicted", 1984)]
    assert tracked.ask(random_token_ids(4, 2000), tenant="t4", cache_salt="x").tokens_by_reason == [], "forgotten"


PIECES = st.lists(st.sampled_from([random_token_ids(seed, 24) for seed in range(8)]), max_size=8)


@given(PIECES, PIECES)
@settings(max_examples=examples(120), deadline=None)
def test_equal_runs_match_and_do_not_overlap(old: list[list[int]], new: list[list[int]]) -> None:
    old_ids, new_ids = concatenate(old), concatenate(new)
    runs = find_equal_runs(array("i", old_ids).tobytes(), array("i", new_ids).tobytes())
    covered: set[int] = set()
    for piece in runs:
        assert (
            old_ids[piece.old_start : piece.old_start + piece.length]
            == new_ids[piece.new_start : piece.new_start + piece.length]
        )
        places = set(range(piece.new_start, piece.new_start + piece.length))
        assert len(places) == piece.length >= 16
        assert not places & covered
        covered |= places
    if old_ids and old_ids == new_ids:
        assert len(covered) == len(old_ids) or len(set(map(tuple, old))) < len(old)
    prefix = common_prefix_length(array("i", old_ids).tobytes(), array("i", new_ids).tobytes())
    assert old_ids[:prefix] == new_ids[:prefix]
    assert old_ids[prefix : prefix + 1] != new_ids[prefix : prefix + 1] or prefix == min(len(old_ids), len(new_ids))


STEPS = st.lists(
    st.tuples(st.integers(0, 2), st.integers(0, 400), st.integers(0, 3), st.integers(0, 25), st.integers(0, 60)),
    max_size=25,
)


@given(STEPS)
@settings(max_examples=examples(100), deadline=None)
@example([(0, 92, 0, 0, 0), (2, 32, 0, 0, 0), (2, 48, 0, 0, 0)])  # the nearest sequence has a shorter common prefix
def test_missed_tokens_never_exceed_computed_tokens(steps: list[tuple[int, int, int, int, int]]) -> None:
    """For any requests in any order: missed tokens are among the computed ones, all counts are positive, and the tree's
    usage order holds (the tracker asserts this when it evicts).
    """
    tracked = TrackedRequests(max_tenant_bytes=20_000, max_total_bytes=40_000)
    for seed, count, tenant, cached, answer in steps:
        prompt = random_token_ids(seed, count)[: count // 2] + random_token_ids(seed + (count % 3), count) + [3]
        num_cached = min(cached * UNIT, (len(prompt) - 1) // UNIT * UNIT)
        report = tracked.ask(prompt, num_cached, answer=random_token_ids(9, answer), tenant=f"t{tenant}")
        assert 0 <= report.num_missed_tokens <= len(prompt) - num_cached
        assert all(tokens > 0 for _, tokens in report.tokens_by_reason)
        assert tracked.misses.total_bytes <= 40_000
