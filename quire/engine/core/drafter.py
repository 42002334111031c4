"""Speculative decoding: the interface of drafters. Draft tokens are verified in the step that computes them, so they
change nothing but how many tokens a step gives."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

from quire.engine.common.request_params import Grammar
from quire.engine.common.types import EngineCoreRequest
from quire.engine.core.request import Request

RequestsToDraft = Sequence[tuple[Request, int]]
"""Requests to draft for, whose tokens are all known on the host, each with the largest useful number of drafts."""


KIND_DEFAULT = 0
"""The kind of draft tokens of which nothing else is known. Kinds from 1 on are n-gram lookup's: the tokens after a
match whose length has this many bits, so kind 3 follows matches of four to seven tokens."""
KIND_FORCED = -1
"""The kind of tokens that a grammar forces. Nearly all are accepted: a model may write the same text in other tokens,
or JSON with other whitespace."""
KIND_FORCED_TEXT = -2
"""The kind of tokens whose text a grammar forces, but which might continue."""
NUM_PROBABILITY_BUCKETS = 10
"""Number of probability buckets; acceptance is tracked per bucket, over all requests."""
FIRST_BUCKET_KIND = 100
"""Kinds from here on are these buckets."""


class Draft(NamedTuple):
    """Draft tokens of one request; empty if none is worth a try."""

    token_ids: list[int]
    kinds: Sequence[int] = ()
    """Of each token; tokens of one kind are accepted about equally often. Empty: all are NEXT, or `probabilities` has
    them."""
    probabilities: Sequence[float] = ()
    """Of each token, as the drafter sees it."""

    def truncate_to(self, count: int) -> Draft:
        """Its first `count` tokens."""
        return Draft(self.token_ids[:count], self.kinds[:count], self.probabilities[:count])


def draft_acceptance_kinds(draft: Draft) -> list[int]:
    """The kind of each token; if the drafter gives probabilities, their buckets."""
    if draft.probabilities:
        return [
            FIRST_BUCKET_KIND + min(int(probability * NUM_PROBABILITY_BUCKETS), NUM_PROBABILITY_BUCKETS - 1)
            for probability in draft.probabilities
        ]
    return list(draft.kinds) or [KIND_DEFAULT] * len(draft.token_ids)


def request_grammar(request: EngineCoreRequest) -> Grammar | None:
    """The request's grammar, if it has one."""
    return None if request.sampling_params is None else request.sampling_params.grammar


class Drafter(ABC):
    @abstractmethod
    def propose(self, draft_requests: RequestsToDraft, num_step_tokens: int) -> list[Draft]:
        """Drafts for each of the requests. `num_step_tokens`: how many tokens the step computes without them."""

    def can_ever_draft(self, request: EngineCoreRequest) -> bool:
        """Whether it ever drafts for such a request. If so, the host must see each token before the next step."""
        return True

    def record_acceptance(self, request: Request, drafts: int, accepted: int) -> None:  # noqa: B027 - most have nothing to learn
        """`drafts` draft tokens of a request were verified, and `accepted` of them accepted."""

    def forget_request(self, request: Request) -> None:  # noqa: B027
        """The request has finished."""


class TokenwiseDrafter(ABC):
    """Drafts one token after the other, so that the caller can decide after each whether one more pays."""

    @abstractmethod
    def draft_first_tokens(self, draft_requests: RequestsToDraft) -> list[Draft]:
        """The first draft token of each request, or none. `draft_next_tokens` appends to these drafts."""

    @abstractmethod
    def draft_next_tokens(self, indices: Sequence[int]) -> None:
        """One more token for the drafts at these indices, ascending, all of which got one in the last call."""

    def forget_request(self, request: Request) -> None:  # noqa: B027
        """The request has finished."""


class NullDrafter(Drafter):
    def can_ever_draft(self, request: EngineCoreRequest) -> bool:
        return False

    def propose(self, draft_requests: RequestsToDraft, num_step_tokens: int) -> list[Draft]:
        return [Draft([]) for _ in draft_requests]
