"""The step that computes draft tokens verifies them, so drafters change only how many tokens a step yields."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

from quire.engine.common.request_params import Grammar
from quire.engine.common.scheduler_output import DRAFT_SOURCES
from quire.engine.common.types import EngineCoreRequest
from quire.engine.core.request import Request

RequestsToDraft = Sequence[tuple[Request, int]]
"""Requests whose tokens are all on the host, each with the maximum number of useful draft tokens."""


KIND_DEFAULT = 0
"""Kinds 1 to 99 are bit lengths of a matched n-gram's length."""
KIND_FORCED = -1
"""Kind of a token that the grammar forces. Nearly all are accepted, unless the model splits text or spaces JSON
differently.
"""
KIND_FORCED_TEXT = -2
"""Kind of a token of text that the grammar forces. The model's token at the end of the text may be longer than the
draft's.
"""
NUM_PROBABILITY_BUCKETS = 10
FIRST_BUCKET_KIND = 100


class Draft(NamedTuple):
    """Empty if no token is worth a try."""

    token_ids: list[int]
    kinds: Sequence[int] = ()
    """One for each token. If empty, they derive from `probabilities`, or are KIND_DEFAULT if that is empty, too."""
    probabilities: Sequence[float] = ()

    def truncate_to(self, count: int) -> Draft:
        return Draft(self.token_ids[:count], self.kinds[:count], self.probabilities[:count])


NO_DRAFT = Draft([])


def draft_acceptance_kinds(draft: Draft) -> list[int]:
    if draft.probabilities:
        return [
            FIRST_BUCKET_KIND + min(int(probability * NUM_PROBABILITY_BUCKETS), NUM_PROBABILITY_BUCKETS - 1)
            for probability in draft.probabilities
        ]
    return list(draft.kinds) or [KIND_DEFAULT] * len(draft.token_ids)


def draft_sources(draft: Draft) -> list[int]:
    """Indices into DRAFT_SOURCES, one for each token."""
    return [DRAFT_SOURCES.index(_source_of_kind(kind)) for kind in draft_acceptance_kinds(draft)]


def _source_of_kind(kind: int) -> str:
    if kind < KIND_DEFAULT:
        return "grammar"
    return "lookup" if KIND_DEFAULT < kind < FIRST_BUCKET_KIND else "model"


def request_grammar(request: EngineCoreRequest) -> Grammar | None:
    return None if request.sampling_params is None else request.sampling_params.grammar


class Drafter(ABC):
    needs_grammar = False
    """True if only requests with a grammar may have drafts. The host must see each token of a request with drafts
    before the next step.
    """

    @abstractmethod
    def propose(self, draft_requests: RequestsToDraft, num_step_tokens: int) -> list[Draft]:
        """`num_step_tokens`: tokens of the step, not counting drafts."""

    def record_acceptance(self, request: Request, drafts: int, accepted: int) -> None:  # noqa: B027 - most have nothing to learn
        ...

    def forget_request(self, request: Request) -> None:  # noqa: B027
        """Called when a request that may have had drafts has finished."""


class TokenwiseDrafter(ABC):
    """A drafter whose caller decides after each draft token whether to draft another one."""

    @abstractmethod
    def draft_first_tokens(self, draft_requests: RequestsToDraft) -> list[Draft]:
        """Begin drafts of at most one token each, to which `draft_next_tokens` appends."""

    @abstractmethod
    def draft_next_tokens(self, indices: Sequence[int]) -> None:
        """Extend the drafts at `indices`, which must ascend and be among those of the last call."""

    def forget_request(self, request: Request) -> None:  # noqa: B027
        ...


class NullDrafter(Drafter):
    """A GrammarDrafter around it drafts only what grammars force."""

    needs_grammar = True

    def propose(self, draft_requests: RequestsToDraft, num_step_tokens: int) -> list[Draft]:
        return [Draft([]) for _ in draft_requests]
