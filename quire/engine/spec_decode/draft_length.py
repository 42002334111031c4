from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul

from quire.engine.core.drafter import (
    FIRST_BUCKET_KIND,
    KIND_FORCED,
    KIND_FORCED_TEXT,
    NUM_PROBABILITY_BUCKETS,
    Draft,
    Drafter,
    RequestsToDraft,
    TokenwiseDrafter,
    draft_acceptance_kinds,
)
from quire.engine.core.request import Request

PRIOR_ACCEPTANCE = 0.6
PRIOR_ACCEPTANCE_OF_KIND = {
    KIND_FORCED: 0.97,
    KIND_FORCED_TEXT: 0.9,
    1: 0.25,
    2: 0.5,
    3: 0.8,
    4: 0.9,
    5: 0.93,
    6: 0.96,
    7: 0.97,
}
"""Approximate rates, measured with SmolLM2 on rewritten texts and JSON."""
REQUEST_DECAY, GLOBAL_DECAY = 0.8, 0.98
UNTRIED_DECAY = 0.99
"""Counts of kinds that are not drafted decay, so that bad kinds are tried again eventually."""


@dataclass(frozen=True, slots=True)
class StepCosts:
    """Seconds per step by number of tokens, measured at startup."""

    num_tokens: tuple[int, ...]
    seconds: tuple[float, ...]

    def estimate_seconds(self, num_tokens: int) -> float:
        right = min(max(bisect_left(self.num_tokens, num_tokens), 1), len(self.num_tokens) - 1)
        (low, high), (least, most) = self.num_tokens[right - 1 : right + 1], self.seconds[right - 1 : right + 1]
        return least + (most - least) * (num_tokens - low) / (high - low)


@dataclass(slots=True)
class AcceptanceRate:
    """Tokens after a rejected one do not count as tried."""

    num_accepted: float = 0.0
    num_tried: float = 0.0

    def estimate_rate(self, prior: float) -> float:
        return (self.num_accepted + prior) / (self.num_tried + 1)

    def add_tokens(self, num_accepted: int, num_tried: int) -> None:
        self.num_accepted += num_accepted
        self.num_tried += num_tried

    def decay(self, factor: float) -> None:
        self.num_accepted *= factor
        self.num_tried *= factor


class AcceptanceTracker:
    def __init__(self) -> None:
        self._global_rates: defaultdict[int, AcceptanceRate] = defaultdict(AcceptanceRate)
        """Over all requests, keyed by kind."""
        self._rates_by_request: dict[str, defaultdict[int, AcceptanceRate]] = {}
        """Keyed by request id, then kind."""

    def acceptance_rate_of_kind(self, request: Request, kind: int) -> float:
        if kind >= FIRST_BUCKET_KIND:
            return self._global_rates[kind].estimate_rate((kind - FIRST_BUCKET_KIND + 0.5) / NUM_PROBABILITY_BUCKETS)
        return self._request_rates(request)[kind].estimate_rate(
            self._global_rates[kind].estimate_rate(PRIOR_ACCEPTANCE_OF_KIND.get(kind, PRIOR_ACCEPTANCE))
        )

    def cumulative_rates(self, request: Request, kinds: Sequence[int]) -> list[float]:
        """For each token, the probability that it and all tokens before it are accepted."""
        return list(accumulate((self.acceptance_rate_of_kind(request, kind) for kind in kinds), mul))

    def record_verified_kinds(self, request: Request, kinds: Sequence[int], num_verified: int) -> None:
        """`num_verified`: number of accepted tokens. The token after them, if any, was rejected."""
        verified_kinds = kinds[: num_verified + 1]
        for kind in set(verified_kinds):
            num_accepted, count = verified_kinds[:num_verified].count(kind), verified_kinds.count(kind)
            for rate, decay in (
                (self._request_rates(request)[kind], REQUEST_DECAY),
                (self._global_rates[kind], GLOBAL_DECAY),
            ):
                rate.decay(decay)
                rate.add_tokens(num_accepted, count)

    def decay_untried_kind(self, request: Request, kind: int) -> None:
        self._request_rates(request)[kind].decay(UNTRIED_DECAY)
        self._global_rates[kind].decay(UNTRIED_DECAY)

    def forget_request(self, request: Request) -> None:
        self._rates_by_request.pop(request.engine_request.id, None)

    def _request_rates(self, request: Request) -> defaultdict[int, AcceptanceRate]:
        return self._rates_by_request.setdefault(request.engine_request.id, defaultdict(AcceptanceRate))


class TrackingDrafter(Drafter):
    def __init__(self, drafter: Drafter | TokenwiseDrafter, max_drafts: int, step_costs: StepCosts) -> None:
        self._max_drafts, self._step_costs = max_drafts, step_costs
        self._acceptance = AcceptanceTracker()
        self._pending_kinds: dict[str, list[int]] = {}
        """Kinds of the draft tokens in flight, keyed by request id."""
        self._forget_in_source = drafter.forget_request

    def forget_request(self, request: Request) -> None:
        self._acceptance.forget_request(request)
        self._pending_kinds.pop(request.engine_request.id, None)
        self._forget_in_source(request)


class AdaptiveLengthDrafter(TrackingDrafter):
    """Shortens another drafter's drafts to maximize tokens per second."""

    def __init__(
        self, drafter: Drafter, max_drafts: int, step_costs: StepCosts, draft_costs: StepCosts | None = None
    ) -> None:
        """`draft_costs`: seconds to draft one token for each of a number of requests. If None, drafting is free, and
        lengths are chosen after drafting.
        """
        super().__init__(drafter, max_drafts, step_costs)
        self.needs_grammar = drafter.needs_grammar
        self._drafter, self._draft_costs = drafter, draft_costs

    def propose(self, draft_requests: RequestsToDraft, num_step_tokens: int) -> list[Draft]:
        requests, max_lengths = (
            [each_request for each_request, _ in draft_requests],
            [min(most, self._max_drafts) for _, most in draft_requests],
        )
        if self._draft_costs is not None:
            max_lengths = self._choose_lengths(requests, [[0] * most for most in max_lengths], num_step_tokens)
        drafts = self._drafter.propose(list(zip(requests, max_lengths, strict=True)), num_step_tokens)
        if self._draft_costs is None and not any(draft.token_ids for draft in drafts):
            return drafts
        kinds = [draft_acceptance_kinds(draft) for draft in drafts]
        lengths = [len(each) for each in kinds]
        if self._draft_costs is None:
            lengths = self._choose_lengths(requests, kinds, num_step_tokens)
        for request, draft_kinds, length in zip(requests, kinds, lengths, strict=True):
            self._pending_kinds[request.engine_request.id] = draft_kinds[:length]
            if not length and (draft_kinds or self._draft_costs is not None):
                self._acceptance.decay_untried_kind(request, draft_kinds[0] if draft_kinds else 0)
        return [draft.truncate_to(length) for draft, length in zip(drafts, lengths, strict=True)]

    def record_acceptance(self, request: Request, drafts: int, accepted: int) -> None:
        self._acceptance.record_verified_kinds(
            request, self._pending_kinds[request.engine_request.id][:drafts], accepted
        )
        self._drafter.record_acceptance(request, drafts, accepted)

    def _choose_lengths(
        self, requests: Sequence[Request], kinds: Sequence[list[int]], num_step_tokens: int
    ) -> list[int]:
        token_seconds = (
            0.0 if self._draft_costs is None else self._draft_costs.estimate_seconds(len(requests)) / len(requests)
        )
        probabilities = [
            self._acceptance.cumulative_rates(request, draft_kinds)
            for request, draft_kinds in zip(requests, kinds, strict=True)
        ]
        return choose_draft_lengths(probabilities, num_step_tokens, self._step_costs, token_seconds)


def choose_draft_lengths(
    probabilities: Sequence[Sequence[float]], num_step_tokens: int, costs: StepCosts, token_seconds: float = 0.0
) -> list[int]:
    """Maximizes the tokens per second of a step with `num_step_tokens` other tokens. `probabilities`: for each draft
    token, the probability that it and all draft tokens before it are accepted. `token_seconds`: time to draft one
    token.
    """
    ordered = sorted(
        ((probability, index) for index, row in enumerate(probabilities) for probability in row),
        key=lambda c: (-c[0], c[1]),
    )
    expected_tokens = accumulate((probability for probability, _ in ordered), initial=float(len(probabilities)))
    speeds = [
        num_expected / (costs.estimate_seconds(num_step_tokens + count) + token_seconds * count)
        for count, num_expected in enumerate(expected_tokens)
    ]
    lengths = [0] * len(probabilities)
    for _, index in ordered[: speeds.index(max(speeds))]:
        lengths[index] += 1
    return lengths
