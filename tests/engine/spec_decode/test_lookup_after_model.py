"""Tests how a lookup's tokens and a model's are joined."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from quire.engine.common.config import SpeculativeConfig
from quire.engine.core.drafter import Draft, Drafter, RequestsToDraft, draft_sources
from quire.engine.core.request import Request
from quire.engine.spec_decode.lookup_after_model import LookupAfterModelDrafter
from quire.engine.spec_decode.ngram_drafter import NgramDrafter
from tests.engine.spec_decode.test_ngram_drafter import sequence

MODEL, LOOKUP = 0, 1


class ListDrafter(Drafter):
    """Drafts the same tokens always, if it is asked to."""

    def __init__(self, token_ids: list[int], probabilities: list[float] | None = None) -> None:
        self.draft = Draft(token_ids, probabilities=probabilities or [])
        self.asked: list[int] = []
        self.learnt: list[tuple[int, int]] = []
        self.forgotten = 0

    def propose(self, asked: RequestsToDraft, tokens: int) -> list[Draft]:
        self.asked += [most for _, most in asked]
        return [self.draft.truncate_to(most) for _, most in asked]

    def record_acceptance(self, seq: Request, drafts: int, accepted: int) -> None:
        self.learnt.append((drafts, accepted))

    def forget_request(self, seq: Request) -> None:
        self.forgotten += 1


def propose(drafter: Drafter, seq: Request, most: int = 100) -> Draft:
    (draft,) = drafter.propose([(seq, most)], 1)
    return draft


def test_lookup_continues_draft_with_what_followed_it_before() -> None:
    """The text's last token is new, so only the draft leads back to the prompt."""
    model = ListDrafter([1, 2], [0.5, 0.25])
    drafter = LookupAfterModelDrafter(model, NgramDrafter(1), 6)
    draft = propose(drafter, sequence([5, 1, 2, 3, 4, 6, 7, 9]))
    assert draft.token_ids == [1, 2, 3, 4, 6, 7]
    assert draft_sources(draft) == [MODEL] * 2 + [LOOKUP] * 4
    assert propose(drafter, sequence([5, 1, 2, 3, 4, 9], "b"), most=3).token_ids == [1, 2, 3]
    assert propose(drafter, sequence([5, 3, 4, 9], "c")).token_ids == [1, 2], "nothing is known of these"
    silent = LookupAfterModelDrafter(ListDrafter([]), NgramDrafter(1), 2)
    assert propose(silent, sequence([8, 3, 4, 8])).token_ids == [3, 4]


def test_source_is_used_whose_tokens_were_accepted_more_often() -> None:
    """A match of one token is first thought worse than the model; what is not used is tried again after a while."""
    model, seq = ListDrafter([1]), sequence([8, 3, 4, 8])
    drafter = LookupAfterModelDrafter(model, NgramDrafter(1), 2)
    assert propose(drafter, seq).token_ids[0] == 1
    firsts = []
    for _ in range(400):
        draft = propose(drafter, seq)
        firsts.append(draft.token_ids[0])
        drafter.record_acceptance(seq, len(draft.token_ids), 0 if firsts[-1] == 1 else 2)
    assert firsts[0] == 1
    assert firsts[20:].count(3) > 360
    before = len(firsts)
    for _ in range(400):
        draft = propose(drafter, seq)
        firsts.append(draft.token_ids[0])
        drafter.record_acceptance(seq, len(draft.token_ids), 1 if firsts[-1] == 1 else 0)
    assert firsts[before + 20 :].count(1) > 360


def test_model_is_not_asked_when_lookup_is_preferred() -> None:
    model, seq = ListDrafter([1]), sequence([8, 5, 6, 7, 3, 4, 8, 5, 6, 7])
    drafter = LookupAfterModelDrafter(model, NgramDrafter(1), 3)
    assert propose(drafter, seq).token_ids == [3, 4, 8], "the match has four tokens"
    assert model.asked == []
    other = sequence([9], "b")
    assert [draft.token_ids for draft in drafter.propose([(seq, 9), (other, 9)], 2)] == [[3, 4, 8], [1]]
    assert model.asked == [0, 3]


def test_model_learns_acceptance_of_its_own_tokens_only() -> None:
    model, seq = ListDrafter([1, 2]), sequence([5, 1, 2, 3, 4, 9])
    lookup = NgramDrafter(1)
    drafter = LookupAfterModelDrafter(model, lookup, 5)
    for drafts, accepted in ((5, 4), (5, 1), (1, 1)):
        propose(drafter, seq)
        drafter.record_acceptance(seq, drafts, accepted)
    assert model.learnt == [(2, 2), (2, 1), (1, 1)]
    drafter.forget_request(seq)
    assert model.forgotten == 1
    assert not drafter._pending
    assert not lookup._indices


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"method": "ngram", "lookup": "suffix"}, "lookup continues the drafts of draft_model"),
        ({"method": "mtp", "num_lookup_tokens": 3}, "num_lookup_tokens needs lookup"),
        ({"method": "mtp", "lookup": "tree"}, "lookup"),
        ({"method": "mtp", "lookup": "ngram", "num_lookup_tokens": 33}, "num_lookup_tokens"),
        ({"method": "mtp", "lookup": "ngram", "lookup_tokens": 3}, "lookup_tokens"),
    ],
)
def test_lookup_settings_are_refused_by_name(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(ValidationError, match=named):
        SpeculativeConfig(**fields)


def test_step_verifies_tokens_of_model_and_lookup() -> None:
    assert SpeculativeConfig(method="mtp", num_speculative_tokens=3).max_draft_tokens == 3
    assert SpeculativeConfig(method="mtp", num_speculative_tokens=3, lookup="ngram").max_draft_tokens == 11
    assert SpeculativeConfig(method="none").max_draft_tokens == 0
