"""Continues the drafts of a model or of heads with a lookup. The model finds the next words, and the lookup finds what
follows them in quotations.
"""

from __future__ import annotations

from dataclasses import dataclass

from quire.engine.core.drafter import KIND_DEFAULT, Draft, Drafter, RequestsToDraft, draft_acceptance_kinds
from quire.engine.core.request import Request
from quire.engine.spec_decode.draft_length import AcceptanceTracker
from quire.engine.spec_decode.ngram_drafter import LookupDrafter


@dataclass(frozen=True, slots=True)
class _PendingDraft:
    num_from_model: int
    kinds: list[int]
    """The model's tokens all have KIND_DEFAULT here, because only sources are compared, not the model's probabilities.
    """


class LookupAfterModelDrafter(Drafter):
    """Skips the model if the lookup's tokens are accepted at least as often."""

    def __init__(self, drafter: Drafter, lookup: LookupDrafter, max_drafts: int) -> None:
        """`max_drafts`: maximum per request and step, of model and lookup together."""
        self.needs_grammar = drafter.needs_grammar
        self._drafter = drafter
        self._lookup = lookup
        self._max_drafts = max_drafts
        self._acceptance = AcceptanceTracker()
        self._pending: dict[str, _PendingDraft] = {}
        """Drafts in flight, keyed by request id."""

    def propose(self, draft_requests: RequestsToDraft, num_step_tokens: int) -> list[Draft]:
        limits = [(request, min(max_drafts, self._max_drafts)) for request, max_drafts in draft_requests]
        lookup_drafts = self._lookup.propose(limits, num_step_tokens)
        asked = [
            (request, 0 if self._prefers_lookup(request, draft) else max_drafts)
            for (request, max_drafts), draft in zip(limits, lookup_drafts, strict=True)
        ]
        model_drafts = [Draft([]) for _ in asked]
        if any(max_drafts for _, max_drafts in asked):
            model_drafts = self._drafter.propose(asked, num_step_tokens)
        return [
            self._join_drafts(request, max_drafts, model_draft, lookup_draft)
            for (request, max_drafts), model_draft, lookup_draft in zip(
                limits, model_drafts, lookup_drafts, strict=True
            )
        ]

    def record_acceptance(self, request: Request, drafts: int, accepted: int) -> None:
        pending = self._pending[request.engine_request.id]
        self._acceptance.record_verified_kinds(request, pending.kinds[:drafts], accepted)
        if num_from_model := min(drafts, pending.num_from_model):
            self._drafter.record_acceptance(request, num_from_model, min(accepted, num_from_model))

    def forget_request(self, request: Request) -> None:
        self._pending.pop(request.engine_request.id, None)
        self._acceptance.forget_request(request)
        self._drafter.forget_request(request)
        self._lookup.forget_request(request)

    def _prefers_lookup(self, request: Request, lookup_draft: Draft) -> bool:
        """The counts of the source that is not preferred decay, so that it gets another chance."""
        if not lookup_draft.token_ids:
            return False
        kind = lookup_draft.kinds[0]
        rates = [self._acceptance.acceptance_rate_of_kind(request, each) for each in (kind, KIND_DEFAULT)]
        prefers_lookup = rates[0] >= rates[1]
        self._acceptance.decay_untried_kind(request, KIND_DEFAULT if prefers_lookup else kind)
        return prefers_lookup

    def _join_drafts(self, request: Request, max_drafts: int, model_draft: Draft, lookup_draft: Draft) -> Draft:
        num_from_model = len(model_draft.token_ids)
        if num_from_model:
            lookup_draft = self._lookup.continue_draft(request, model_draft.token_ids, max_drafts - num_from_model)
        lookup_kinds = list(lookup_draft.kinds)
        self._pending[request.engine_request.id] = _PendingDraft(
            num_from_model, [KIND_DEFAULT] * num_from_model + lookup_kinds
        )
        return Draft(model_draft.token_ids + lookup_draft.token_ids, draft_acceptance_kinds(model_draft) + lookup_kinds)
