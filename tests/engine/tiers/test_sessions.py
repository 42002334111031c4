"""Tests pinned blocks of paused conversations: what is pinned, what is unpinned first, and that no allocation waits for
it.
"""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from quire.engine.common.request_params import SamplingParams
from quire.engine.common.types import EngineCoreRequest
from quire.engine.core.block_pool import BlockPool, block_hash, root_hash
from quire.engine.core.pinned_sessions import DEFAULT_KEEP_SECONDS, PinnedSessions
from quire.engine.core.request import Request
from tests.tiers import examples

PAGE = 16


class House:
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
        made = cached + self.pool.allocate(pages - len(cached))
        for page, digest in zip(made, digests, strict=True):
            self.pool.cache_block(page, digest)
        self.sessions.pause_session(seq, made, digests)
        self.pool.unref(made)
        self.pool.check_invariants()
        self.now += 1
        return len(cached)

    def cached(self, pages: int, of: int) -> int:
        parent, found = root_hash(""), []
        for page in range(pages):
            parent = block_hash(parent, [of * 1000 + page * PAGE + place for place in range(PAGE)])
            found.append(parent)
        return len(self.pool.get_cached_prefix(found))

    def others(self, pages: int, first: int = 500) -> None:
        """Prompts of four blocks each, in conversations of a single turn."""
        for number in range(pages // 4):
            self.turn(4, of=first + number)


def test_a_conversation_from_its_second_turn_on_outlives_prompts_that_nobody_goes_on_from() -> None:
    house = House()
    house.turn(8, of=1)
    assert house.pool.num_pinned == 0, "most prompts are never gone on from"
    assert house.turn(10, of=1) == 8
    assert house.pool.num_pinned == 10
    house.others(200)
    assert house.turn(12, of=1) == 10
    house.sessions.clear_sessions()
    house.others(200)
    assert house.cached(12, of=1) == 0


def test_a_tenant_that_sends_what_another_sent_takes_over_nothing_of_its_conversation() -> None:
    house = House()
    house.turn(4, of=1, tenant="a")
    house.turn(6, of=1, tenant="a")
    house.turn(6, of=1, tenant="b")
    house.turn(9, of=1, tenant="b", session="mine")
    first, second = house.sessions.remembered_sessions
    assert (first.tenant, first.key, len(first.blocks)) == ("a", None, 6)
    assert second.tenant == "b"
    assert len(second.blocks) == 9


def test_one_with_an_id_is_kept_from_its_first_turn_and_found_though_its_text_was_rewritten() -> None:
    house = House()
    house.turn(8, of=1, session="a")
    house.others(200)
    assert house.turn(9, of=1, session="a") == 8
    house.turn(6, of=2, session="a")
    assert house.pool.num_pinned == 6, "the turn before it is not kept any more"
    house.turn(6, of=3, keep=30.0)
    assert house.pool.num_pinned == 12


def test_time_ends_it() -> None:
    house = House()
    house.turn(8, of=1, session="a", keep=30.0)
    house.turn(8, of=2, session="b")
    house.now += 30
    house.sessions.unpin_expired()
    assert (house.pool.num_pinned, house.sessions.counts.kept_sessions) == (8, 1)
    house.now += DEFAULT_KEEP_SECONDS
    house.sessions.unpin_expired()
    assert house.pool.num_pinned == 0
    house.others(40)
    assert (house.cached(8, of=1), house.cached(8, of=2)) == (0, 0)


def test_who_has_paused_long_against_its_own_pauses_gives_up_first() -> None:
    house = House(40, share=1.0)
    for turn in range(6):  # "quick" takes a turn every 2 seconds, "slow" every 100
        house.turn(5 + turn, of=1, session="quick")
        house.now += 1
    for turn in range(4):
        house.turn(5 + turn, of=2, session="slow")
        house.now += 100
    house.turn(15, of=3, session="new")
    house.now += 15
    house.turn(12, of=4)
    assert (house.cached(10, of=1), house.cached(8, of=2), house.cached(15, of=3)) == (3, 8, 15)


def test_who_keeps_most_makes_room_for_others() -> None:
    house = House(40)
    for number in range(2):
        house.turn(10, of=number, session=f"{number}", tenant="much")
    house.turn(6, of=8, session="x", tenant="little")
    assert house.pool.num_pinned == 20
    assert (house.cached(6, of=8), house.sessions.counts.kept_sessions) == (6, 3)
    house.others(80)
    assert (house.cached(6, of=8), house.cached(10, of=0), house.cached(10, of=1)) == (6, 4, 10)


def test_nobody_waits_for_what_is_kept() -> None:
    house = House(40, share=1.0)
    for number in range(4):
        house.turn(10, of=number, session=f"{number}")
    assert house.pool.num_free == 40
    pages = house.pool.allocate(40)
    assert (len(pages), house.pool.num_pinned) == (40, 0)
    house.pool.unref(pages)
    house.pool.check_invariants()


TURNS = st.lists(
    st.tuples(
        *(st.integers(1, 9), st.integers(0, 6), st.sampled_from(["", "", "s"]), st.integers(0, 2)),
        *(st.sampled_from([0.0, 5.0]), st.integers(0, 40)),
    ),
    max_size=60,
)


@given(TURNS, st.sampled_from([0.0, 0.3, 0.5, 1.0]))
@settings(max_examples=examples(200), deadline=None)
def test_kept_pages_keep_to_their_bound_and_take_nothing_from_others(
    turns: list[tuple[int, int, str, int, float, int]], share: float
) -> None:
    """For any turns: no more than the share is pinned; every allocation that the pool has room for succeeds (the pool
    asserts this); a tenant that pins no more than its part loses nothing to one that pins more; and the session count
    equals the number of sessions with blocks.
    """
    house = House(24, share)
    most = int(24 * share)
    for pages, of, session, tenant, keep, wait in turns:
        name, before = f"t{tenant}", by_tenant(house)
        house.turn(pages, of=of + 10 * tenant, session=session and f"s{of}", tenant=name, keep=keep)
        after = by_tenant(house)
        assert house.pool.num_pinned <= most
        assert sum(after.values()) <= 4 * most
        assert house.sessions.counts.kept_sessions == len(
            [each for each in house.sessions.remembered_sessions if each.blocks]
        )
        given_up = house.sessions.counts.sessions_given_up
        if not given_up:
            for other, held in before.items():
                if other != name and held * max(len(after), 1) <= most:
                    assert after[other] == held, "a small one gave way to a larger one"
        house.now += wait
        house.sessions.unpin_expired()


def by_tenant(house: House) -> Counter[str]:
    found = Counter[str]()
    for each in house.sessions.remembered_sessions:
        found[each.tenant] += len(each.blocks)
    return found
