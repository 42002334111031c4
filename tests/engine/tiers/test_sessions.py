"""Tests pinned blocks of paused conversations: what is pinned, what is unpinned first, and that no allocation waits for
it.
"""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from quire.engine.common.request_params import SamplingParams
from quire.engine.common.types import EngineCoreRequest
from quire.engine.core.kv_cache.block_pool import BlockPool
from quire.engine.core.kv_cache.pinned_sessions import DEFAULT_KEEP_SECONDS, PinnedSessions
from quire.engine.core.request import Request, block_hash, root_hash
from tests.tiers import examples

PAGE = 16


class SessionHarness:
    """A block pool, the sessions that pin its blocks, and a clock set by hand. One block is one hash block."""

    def __init__(self, pages: int = 40, share: float = 0.5) -> None:
        self.now = 1.0
        self.pool = BlockPool(pages)
        self.sessions = PinnedSessions(self.pool, share, lambda: self.now)
        self._number = 0

    def turn(self, pages: int, *, of: int, session: str = "", tenant: str = "", keep: float = 0.0) -> int:
        """Compute a prompt of `pages` blocks, the first ones of conversation `of`; returns how many of them were
        cached.
        """
        self._number += 1
        params = SamplingParams(max_tokens=1)
        more = {"session": session, "tenant": tenant, "keep_seconds": keep}
        ids = [of * 1000 + place for place in range(pages * PAGE + 1)]
        seq = Request(EngineCoreRequest(id=f"{self._number}", prompt_ids=ids, params=params, seed=0, **more), 0, 1)
        digests = seq.block_hashes(pages, PAGE)
        cached = self.pool.get_cached_prefix(digests)
        self.pool.ref(cached)
        seq.num_cached_tokens = len(cached) * PAGE
        self.sessions.record_session_resume(seq, digests)
        blocks = cached + self.pool.allocate(pages - len(cached))
        for page, digest in zip(blocks, digests, strict=True):
            self.pool.cache_block(page, digest)
        self.sessions.pause_session(seq, blocks, digests)
        self.pool.unref(blocks)
        self.pool.check_invariants()
        self.now += 1
        return len(cached)

    def cached(self, pages: int, of: int) -> int:
        parent, hashes = root_hash(""), []
        for page in range(pages):
            parent = block_hash(parent, [of * 1000 + page * PAGE + place for place in range(PAGE)])
            hashes.append(parent)
        return len(self.pool.get_cached_prefix(hashes))

    def others(self, pages: int, first: int = 500) -> None:
        """Prompts of four blocks each, in conversations of a single turn."""
        for number in range(pages // 4):
            self.turn(4, of=first + number)


def test_conversation_is_pinned_from_second_turn() -> None:
    harness = SessionHarness()
    harness.turn(8, of=1)
    assert harness.pool.num_pinned == 0, "most prompts are never gone on from"
    assert harness.turn(10, of=1) == 8
    assert harness.pool.num_pinned == 10
    harness.others(200)
    assert harness.turn(12, of=1) == 10
    harness.sessions.clear_sessions()
    harness.others(200)
    assert harness.cached(12, of=1) == 0


def test_same_prompt_of_other_tenant_starts_own_session() -> None:
    harness = SessionHarness()
    harness.turn(4, of=1, tenant="a")
    harness.turn(6, of=1, tenant="a")
    harness.turn(6, of=1, tenant="b")
    harness.turn(9, of=1, tenant="b", session="mine")
    first, second = harness.sessions.remembered_sessions
    assert (first.tenant, first.key, len(first.blocks)) == ("a", None, 6)
    assert second.tenant == "b"
    assert len(second.blocks) == 9


def test_session_id_pins_first_turn_and_survives_rewritten_text() -> None:
    harness = SessionHarness()
    harness.turn(8, of=1, session="a")
    harness.others(200)
    assert harness.turn(9, of=1, session="a") == 8
    harness.turn(6, of=2, session="a")
    assert harness.pool.num_pinned == 6, "the turn before it is not kept any more"
    harness.turn(6, of=3, keep=30.0)
    assert harness.pool.num_pinned == 12


def test_pinned_session_expires() -> None:
    harness = SessionHarness()
    harness.turn(8, of=1, session="a", keep=30.0)
    harness.turn(8, of=2, session="b")
    harness.now += 30
    harness.sessions.unpin_expired()
    assert (harness.pool.num_pinned, harness.sessions.counts.kept_sessions) == (8, 1)
    harness.now += DEFAULT_KEEP_SECONDS
    harness.sessions.unpin_expired()
    assert harness.pool.num_pinned == 0
    harness.others(40)
    assert (harness.cached(8, of=1), harness.cached(8, of=2)) == (0, 0)


def test_session_overdue_by_own_pauses_is_unpinned_first() -> None:
    harness = SessionHarness(40, share=1.0)
    for turn in range(6):  # "quick" takes a turn every 2 seconds, "slow" every 100
        harness.turn(5 + turn, of=1, session="quick")
        harness.now += 1
    for turn in range(4):
        harness.turn(5 + turn, of=2, session="slow")
        harness.now += 100
    harness.turn(15, of=3, session="new")
    harness.now += 15
    harness.turn(12, of=4)
    assert (harness.cached(10, of=1), harness.cached(8, of=2), harness.cached(15, of=3)) == (3, 8, 15)


def test_tenant_with_most_pinned_blocks_yields_first() -> None:
    harness = SessionHarness(40)
    for number in range(2):
        harness.turn(10, of=number, session=f"{number}", tenant="much")
    harness.turn(6, of=8, session="x", tenant="little")
    assert harness.pool.num_pinned == 20
    assert (harness.cached(6, of=8), harness.sessions.counts.kept_sessions) == (6, 3)
    harness.others(80)
    assert (harness.cached(6, of=8), harness.cached(10, of=0), harness.cached(10, of=1)) == (6, 4, 10)


def test_allocation_takes_pinned_blocks_without_waiting() -> None:
    harness = SessionHarness(40, share=1.0)
    for number in range(4):
        harness.turn(10, of=number, session=f"{number}")
    assert harness.pool.num_free == 40
    pages = harness.pool.allocate(40)
    assert (len(pages), harness.pool.num_pinned) == (40, 0)
    harness.pool.unref(pages)
    harness.pool.check_invariants()


TURNS = st.lists(
    st.tuples(
        *(st.integers(1, 9), st.integers(0, 6), st.sampled_from(["", "", "s"]), st.integers(0, 2)),
        *(st.sampled_from([0.0, 5.0]), st.integers(0, 40)),
    ),
    max_size=60,
)


@given(TURNS, st.sampled_from([0.0, 0.3, 0.5, 1.0]))
@settings(max_examples=examples(200), deadline=None)
def test_pinned_blocks_stay_within_share_and_spare_small_tenants(
    turns: list[tuple[int, int, str, int, float, int]], share: float
) -> None:
    """For any turns: no more than the share is pinned; every allocation that the pool has room for succeeds (the pool
    asserts this); a tenant that pins no more than its part loses nothing to one that pins more; and the session count
    equals the number of sessions with blocks.
    """
    harness = SessionHarness(24, share)
    most = int(24 * share)
    for pages, of, session, tenant, keep, wait in turns:
        name, before = f"t{tenant}", pinned_blocks_by_tenant(harness)
        harness.turn(pages, of=of + 10 * tenant, session=session and f"s{of}", tenant=name, keep=keep)
        after = pinned_blocks_by_tenant(harness)
        assert harness.pool.num_pinned <= most
        assert sum(after.values()) <= 4 * most
        assert harness.sessions.counts.kept_sessions == len(
            [each for each in harness.sessions.remembered_sessions if each.blocks]
        )
        given_up = harness.sessions.counts.sessions_given_up
        if not given_up:
            for other, num_pinned in before.items():
                if other != name and num_pinned * max(len(after), 1) <= most:
                    assert after[other] == num_pinned, "a small one gave way to a larger one"
        harness.now += wait
        harness.sessions.unpin_expired()


def pinned_blocks_by_tenant(house: SessionHarness) -> Counter[str]:
    counts = Counter[str]()
    for each in house.sessions.remembered_sessions:
        counts[each.tenant] += len(each.blocks)
    return counts
