"""Tests the n-gram drafters against a search of the whole text."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from quire.engine.common.request_params import SamplingParams
from quire.engine.common.types import EngineCoreRequest
from quire.engine.core.request import Request
from quire.engine.spec_decode.ngram_drafter import (
    MAX_CANDIDATES,
    MAX_MATCH_LENGTH,
    MAX_SHARED_TOKENS,
    NGRAM_LENGTHS,
    MatchPosition,
    NgramDrafter,
    NgramIndex,
    SuffixDrafter,
    copy_continuation,
)

TEXTS = st.lists(st.integers(0, 2), min_size=1, max_size=80)


def sequence(tokens: list[int], name: str = "a", salt: str = "", prompt: int | None = None) -> Request:
    cut = len(tokens) if prompt is None else prompt
    request = EngineCoreRequest(
        id=name,
        prompt_ids=tokens[:cut],
        emitted_ids=tokens[cut:],
        params=SamplingParams(max_tokens=100),
        seed=0,
        cache_salt=salt,
    )
    return Request(request, 0, 100, drafting=True)


def find_longest_match(text: list[int], least: int, known: int | None = None) -> tuple[int, int] | None:
    """The longest match at the end of `text`, as the number of matched tokens and the place that follows it.

    Only the latest MAX_CANDIDATES places that follow the longest n-gram at the end of `text` count, and only places
    before `known`.
    """
    known = known or len(text)
    for gram in sorted({least, *(each for each in NGRAM_LENGTHS if each > least)}, reverse=True):
        places = [at for at in range(gram, known) if text[at - gram : at] == text[-gram:]][-MAX_CANDIDATES:]
        matches = []
        for at in places:
            length = 0
            while length < min(at, MAX_MATCH_LENGTH) and text[at - 1 - length] == text[-1 - length]:
                length += 1
            matches.append((length, at))
        if matches:
            return max(matches)
    return None


@given(TEXTS, TEXTS, st.integers(1, 4))
def test_ngram_drafter_finds_longest_match_as_text_grows(begin: list[int], more: list[int], least: int) -> None:
    seq, lookup = sequence(begin), NgramDrafter(least)
    for token in [*more, None]:
        expected = find_longest_match(seq.token_ids, least)
        ((drafts, kinds, _),) = lookup.propose([(seq, 5)], 1)
        if expected is None:
            assert drafts == []
        else:
            length, at = expected
            assert drafts == (seq.token_ids[at:] * 5)[:5]  # a text that is too short repeats from the match
            assert {1 << kind - 1 <= length < 1 << kind for kind in kinds} == {True}
            assert len(kinds) == len(drafts)
        if token is not None:
            seq.token_ids.append(token)


@given(TEXTS, st.lists(st.integers(0, 2), max_size=8), st.integers(1, 4))
def test_draft_is_continued_by_longest_match_of_text_and_draft(text: list[int], drafted: list[int], least: int) -> None:
    (drafts, kinds, _), whole = NgramDrafter(least).continue_draft(sequence(text), drafted, 6), text + drafted
    if (expected := find_longest_match(whole, least, len(text))) is None:
        assert drafts == []
    else:
        length, at = expected
        assert drafts == (whole[at:] * 6)[:6]
        assert {1 << kind - 1 <= length < 1 << kind for kind in kinds} == {True}


def test_copy_continuation_repeats_periodic_text() -> None:
    assert copy_continuation(MatchPosition([1, 2, 3, 7, 8], 3), 5) == [7, 8, 7, 8, 7]
    assert copy_continuation(MatchPosition([1, 2, 3, 7, 8], 5), 5) == []


def test_recent_answers_are_drafted_only_within_cache_salt() -> None:
    lookup = SuffixDrafter(2)
    lookup.forget_request(sequence([5, 6, 7, 8, 9], prompt=2, salt="ours"))
    requests = [(sequence([1, 6, 7], "same", "ours"), 4), (sequence([1, 6, 7], "other", "theirs"), 4)]
    assert [guess.token_ids for guess in lookup.propose(requests, 2)] == [[8, 9, 8, 9], []]


def test_own_text_is_preferred_to_equally_long_shared_match() -> None:
    lookup = SuffixDrafter(2)
    lookup.forget_request(sequence([0, 6, 7, 8], prompt=2))
    assert lookup.propose([(sequence([3, 6, 7, 1, 4, 6, 7]), 1)], 1)[0].token_ids == [1]


def test_recent_answers_are_bounded_and_oldest_evicted() -> None:
    lookup, answer = SuffixDrafter(1), list(range(1000, 1000 + MAX_SHARED_TOKENS // 4))
    for number in range(12):
        lookup.forget_request(sequence([1, 100 + number, *answer], prompt=1))
    has_draft = [bool(lookup.propose([(sequence([2, 100 + number], "b"), 1)], 1)[0].token_ids) for number in range(12)]
    assert has_draft[-3:] == [True] * 3
    assert not any(has_draft[:4])


def test_ngram_index_returns_latest_matches_first() -> None:
    index, text = NgramIndex(1), [4] * 20
    index.index_tokens(text, 0, len(text))
    assert [at for _, at in index.find_matches([0, 4])] == list(range(19, 19 - MAX_CANDIDATES, -1))
