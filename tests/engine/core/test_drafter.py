"""What is learnt of a draft token is learnt by its kind."""

from __future__ import annotations

from quire.engine.core.drafter import FIRST_BUCKET_KIND, KIND_DEFAULT, KIND_FORCED, Draft, draft_acceptance_kinds


def test_draft_kinds_are_buckets_when_it_has_probabilities() -> None:
    draft = Draft([5, 6, 7, 8], probabilities=[0.0, 0.09, 0.95, 1.0])
    last = FIRST_BUCKET_KIND + 9
    assert draft_acceptance_kinds(draft) == [FIRST_BUCKET_KIND, FIRST_BUCKET_KIND, last, last]


def test_draft_kinds_are_its_own_when_it_has_no_probabilities() -> None:
    assert draft_acceptance_kinds(Draft([5, 6], [3, KIND_FORCED])) == [3, KIND_FORCED]
    assert draft_acceptance_kinds(Draft([5, 6])) == [KIND_DEFAULT, KIND_DEFAULT]


def test_draft_keeps_what_belongs_to_its_tokens_when_it_is_cut() -> None:
    assert Draft([5, 6], [1, 2]).truncate_to(1) == Draft([5], [1])
    assert Draft([5, 6], probabilities=[0.5, 0.25]).truncate_to(1) == Draft([5], probabilities=[0.5])
