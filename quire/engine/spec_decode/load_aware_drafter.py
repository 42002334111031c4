"""Under load, only drafts that are almost certain, such as those after long matches, save time. So a request without a
grammar drafts only now and then, and directly after a step that verified its drafts.
"""

from __future__ import annotations

from functools import lru_cache, partial

from quire.engine.core.drafter import Draft, Drafter, RequestsToDraft, request_grammar
from quire.engine.core.request import Request
from quire.engine.spec_decode.draft_length import StepCosts

PROBE_INTERVAL = 8
MAX_DRAFTS = 32
LOAD_THRESHOLD = 0.5
"""Break-even acceptance probability from which the engine counts as loaded."""


class LoadAwareDrafter(Drafter):
    def __init__(self, drafter: Drafter, costs: StepCosts) -> None:
        self.needs_grammar = drafter.needs_grammar
        self._drafter = drafter
        self._break_even_rate = lru_cache(1024)(partial(break_even_rate, costs=costs))
        self._recently_verified: set[str] = set()

    def propose(self, draft_requests: RequestsToDraft, num_step_tokens: int) -> list[Draft]:
        is_loaded = self._break_even_rate(len(draft_requests), num_step_tokens) >= LOAD_THRESHOLD
        indices = [
            index for index, (request, _) in enumerate(draft_requests) if not is_loaded or self._should_probe(request)
        ]
        self._recently_verified.clear()
        drafts = [Draft([]) for _ in draft_requests]
        if indices:
            proposed_drafts = self._drafter.propose([draft_requests[index] for index in indices], num_step_tokens)
            for index, draft in zip(indices, proposed_drafts, strict=True):
                drafts[index] = draft
        return drafts

    def record_acceptance(self, request: Request, drafts: int, accepted: int) -> None:
        self._recently_verified.add(request.engine_request.id)
        self._drafter.record_acceptance(request, drafts, accepted)

    def forget_request(self, request: Request) -> None:
        self._recently_verified.discard(request.engine_request.id)
        self._drafter.forget_request(request)

    def _should_probe(self, request: Request) -> bool:
        """Requests with a grammar always draft, because forced tokens are certain."""
        is_due = (len(request.token_ids) + request.arrival) % PROBE_INTERVAL == 0
        return (
            is_due
            or request.engine_request.id in self._recently_verified
            or request_grammar(request.engine_request) is not None
        )


def break_even_rate(num_requests: int, num_step_tokens: int, costs: StepCosts) -> float:
    """Lowest acceptance probability at which verifying drafts, from 1 to MAX_DRAFTS in a step, saves time."""
    step_seconds = costs.estimate_seconds(num_step_tokens)
    measured_counts = [
        count - num_step_tokens for count in costs.num_tokens if 1 < count - num_step_tokens < MAX_DRAFTS
    ]  # costs are linear between these counts
    return min(
        num_requests * (costs.estimate_seconds(num_step_tokens + num_drafts) / step_seconds - 1.0) / num_drafts
        for num_drafts in (1, *measured_counts, MAX_DRAFTS)
    )
