from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from quire.engine.core.drafter import KIND_DEFAULT, Draft, RequestsToDraft, TokenwiseDrafter, draft_acceptance_kinds
from quire.engine.core.request import Request
from quire.engine.spec_decode.draft_length import StepCosts, TrackingDrafter


class AdaptiveTokenwiseDrafter(TrackingDrafter):
    def __init__(
        self, drafter: TokenwiseDrafter, max_drafts: int, step_costs: StepCosts, draft_costs: StepCosts
    ) -> None:
        super().__init__(drafter, max_drafts, step_costs)
        self._drafter, self._draft_costs = drafter, draft_costs

    def propose(self, draft_requests: RequestsToDraft, num_step_tokens: int) -> list[Draft]:
        max_lengths = [min(max_drafts, self._max_drafts) for _, max_drafts in draft_requests]
        requests = [each_request for each_request, _ in draft_requests]
        chosen_indices = self._choose_extensions(
            requests,
            [1.0 if max_drafts > 0 else 0.0 for max_drafts in max_lengths],
            float(len(draft_requests)),
            0.0,
            num_step_tokens,
        )
        for index in set(range(len(requests))).difference(chosen_indices):
            self._acceptance.decay_untried_kind(requests[index], KIND_DEFAULT)
        if not chosen_indices:
            drafts = [Draft([]) for _ in draft_requests]
        else:
            counts = [max_drafts if index in chosen_indices else 0 for index, max_drafts in enumerate(max_lengths)]
            drafts = self._drafter.draft_first_tokens(list(zip(requests, counts, strict=True)))
            self._extend_drafts_while_worthwhile(drafts, requests, max_lengths, num_step_tokens)
        for request, draft in zip(requests, drafts, strict=True):
            self._pending_kinds[request.engine_request.id] = draft_acceptance_kinds(draft)
        return drafts

    def record_acceptance(self, request: Request, drafts: int, accepted: int) -> None:
        kinds = self._pending_kinds[request.engine_request.id][:drafts]
        self._acceptance.record_verified_kinds(request, kinds, accepted)
        self._acceptance.record_verified_kinds(request, [KIND_DEFAULT] * len(kinds), accepted)

    def _extend_drafts_while_worthwhile(
        self, drafts: list[Draft], requests: list[Request], max_lengths: list[int], num_step_tokens: int
    ) -> None:
        spent_seconds, open_indices = (
            self._draft_costs.estimate_seconds(max(sum(1 for draft in drafts if draft.token_ids), 1)),
            list(range(len(drafts))),
        )
        while True:
            num_drafted = sum(len(draft.token_ids) for draft in drafts)
            probabilities = [
                self._acceptance.cumulative_rates(request, draft_acceptance_kinds(each))
                for request, each in zip(requests, drafts, strict=True)
            ]
            expected_tokens = len(drafts) + sum(map(sum, probabilities))
            last_probabilities = [0.0] * len(drafts)
            for index in open_indices:
                if 0 < len(drafts[index].token_ids) < max_lengths[index]:
                    last_probabilities[index] = probabilities[index][-1]
            open_indices = self._choose_extensions(
                requests, last_probabilities, expected_tokens, spent_seconds, num_step_tokens + num_drafted
            )
            if not open_indices:
                return
            self._drafter.draft_next_tokens(open_indices)
            spent_seconds += self._draft_costs.estimate_seconds(len(open_indices))

    def _choose_extensions(
        self,
        requests: Sequence[Request],
        last_probabilities: Sequence[float],
        expected_tokens: float,
        spent_seconds: float,
        num_step_tokens: int,
    ) -> list[int]:
        """Choose drafts for which one more token raises tokens per second.

        `last_probabilities`: for each draft, the probability that the whole draft is accepted; 0 if it must not grow.
        """
        gains = [
            (probability * self._acceptance.acceptance_rate_of_kind(request, KIND_DEFAULT), index)
            for index, (request, probability) in enumerate(zip(requests, last_probabilities, strict=True))
            if probability > 0.0
        ]
        gains.sort(key=lambda each: (-each[0], each[1]))
        speeds = [expected_tokens / (spent_seconds + self._step_costs.estimate_seconds(num_step_tokens))]
        for count, total in enumerate(accumulate(more for more, _ in gains), 1):
            speeds.append(
                (expected_tokens + total)
                / (
                    spent_seconds
                    + self._draft_costs.estimate_seconds(count)
                    + self._step_costs.estimate_seconds(num_step_tokens + count)
                )
            )
        return sorted(index for _, index in gains[: speeds.index(max(speeds))])
