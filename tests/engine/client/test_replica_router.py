"""The router's choice of a replica: the rule on small cases, and invariants for random requests."""

from __future__ import annotations

from collections import OrderedDict

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from quire.engine.client.replica_router import MOST_AHEAD, PIECE, Router, prefix_pieces
from quire.engine.common.request_params import SamplingParams
from quire.engine.common.types import Adapter, EngineCoreRequest
from tests.tiers import examples

ALL = range(2)


def prompt(*words: int) -> list[bytes]:
    """Prefix pieces of a prompt; each word fills one piece."""
    ids = [token for word in words for token in [word] * PIECE]
    return prefix_pieces(request(ids))


def request(ids: list[int], salt: str = "", adapter: Adapter | None = None) -> EngineCoreRequest:
    return EngineCoreRequest(id="a", prompt_ids=ids, params=SamplingParams(), seed=0, cache_salt=salt, adapter=adapter)


def test_prefix_piece_identifies_all_tokens_before_piece_end() -> None:
    assert prompt(1, 2)[0] == prompt(1, 3)[0] != prompt(2, 1)[0]
    assert prompt(1, 2)[1] != prompt(2, 2)[1]
    assert len(prefix_pieces(request([1] * (2 * PIECE - 1)))) == 1
    assert prefix_pieces(request([1] * (PIECE - 1))) == []


def test_prefix_pieces_differ_by_cache_salt_and_adapter() -> None:
    ids = [1] * PIECE
    adapters = [Adapter("a", digest, "/a") for digest in ("01" * 32, "02" * 32)]
    kinds = [request(ids), request(ids, "x"), *(request(ids, "", each) for each in adapters)]
    assert len({prefix_pieces(each)[0] for each in kinds}) == len(kinds)
    assert prefix_pieces(kinds[2]) == prefix_pieces(request(ids, "", Adapter("b", adapters[0].digest, "/b")))


def test_router_spreads_new_prompts_and_sends_cached_ones_back() -> None:
    router = Router(2)
    assert [router.place(prompt(word), ALL) for word in range(4)] == [0, 1, 0, 1]
    for each in (0, 0, 1, 1):
        router.record_request_end(each)
    assert [router.place(prompt(word, 9), ALL) for word in (3, 2, 1, 0)] == [1, 0, 1, 0]


def test_router_spreads_sequential_prompts_over_replicas() -> None:
    router = Router(2)
    replicas = []
    for word in range(4):
        replicas.append(router.place(prompt(word), ALL))
        router.record_request_end(replicas[-1])
    assert replicas == [0, 1, 0, 1]


def test_router_load_imbalance_is_bounded_by_cached_pieces() -> None:
    router = Router(2)
    assert router.place(prompt(1, 2, 3), ALL) == 0
    assert [router.place(prompt(1, 2, 3), ALL) for _ in range(4)] == [0, 0, 0, 1]
    assert router.place(prompt(1, 2, 3), ALL) == 1, "both have it now"


def test_router_load_imbalance_is_bounded_for_long_prefix() -> None:
    router, long = Router(2), prompt(*range(100))
    assert [router.place(long, ALL) for _ in range(MOST_AHEAD + 2)] == [0] * (MOST_AHEAD + 1) + [1]


def test_router_skips_unavailable_replica_and_forgotten_prefix() -> None:
    router = Router(2)
    assert router.place(prompt(1, 2), ALL) == 0
    assert router.place(prompt(1, 2), [1]) == 1
    router.forget(0)
    assert router.cached(0, prompt(1, 2)) == 0
    assert router.place(prompt(1, 2), ALL) == 1


@settings(deadline=None, max_examples=examples(100))
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 6)), max_size=60), st.integers(1, 12))
def test_router_cache_model_evicts_least_recently_used_ends(sent: list[tuple[int, int]], most: int) -> None:
    """Compared with an engine that evicts the same way: the ends of the least recently used prompts go first."""
    router, model = Router(1, most), OrderedDict[tuple[int, int], None]()
    for word, length in sent:
        router.place(prompt(word, *range(length)), [0])
        for end in range(length, -1, -1):
            model[word, end] = None
            model.move_to_end((word, end))
        while len(model) > most:
            model.popitem(last=False)
        for known in range(4):
            expected = len([end for each, end in model if each == known])
            assert router.cached(0, prompt(known, *range(9))) == expected


class Routed(RuleBasedStateMachine):
    """Requests arrive and end in any order on three replicas."""

    @initialize()
    def begin(self) -> None:
        self.router = Router(3, most_pieces=20)
        self.open = [0, 0, 0]

    @rule(
        words=st.lists(st.integers(0, 2), max_size=5),
        among=st.sets(st.integers(0, 2), min_size=1).map(sorted),
    )
    def come(self, words: list[int], among: list[int]) -> None:
        pieces = prompt(*words)
        cached = {each: self.router.cached(each, pieces) for each in among}
        chosen = self.router.place(pieces, among)
        assert chosen in among
        least = min(self.open[each] for each in among)
        assert self.open[chosen] <= least + min(MOST_AHEAD, cached[chosen])
        if self.open[chosen] > least:
            assert cached[chosen] == max(cached.values()), "only the longest prefix is worth a wait"
        elif cached[chosen] < max(cached.values()):
            best = min(self.open[each] for each in among if cached[each] == max(cached.values()))
            assert best - least > max(cached.values()) - cached[chosen], "a longer prefix was near"
        self.open[chosen] += 1
        assert self.router.cached(chosen, pieces) == len(pieces)

    @rule(chosen=st.integers(0, 2))
    def end(self, chosen: int) -> None:
        if self.open[chosen]:
            self.open[chosen] -= 1
            self.router.record_request_end(chosen)

    @rule(replica=st.integers(0, 2))
    def forget(self, replica: int) -> None:
        self.router.forget(replica)

    @invariant()
    def counts(self) -> None:
        assert self.router.open == self.open


TestRouted = Routed.TestCase
TestRouted.settings = settings(deadline=None, max_examples=examples(100), stateful_step_count=40)
