"""Drafts of another, smaller model (Leviathan et al., 2023). It picks with the request's own parameters and random
numbers, as the model itself will, so its guesses also agree where tokens are drawn.

Its keys and values are in pages of the same numbers as the model's own: a sequence's pages are its pages here too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from quire.engine.core.drafter import Draft, DraftRequests, StepwiseDrafter
from quire.engine.core.request import Request
from quire.engine.core.scheduler_output import DrafterCatchUp, DraftToken, NewRequestData
from quire.engine.types import SamplingParams


class DraftingModel(Protocol):
    """What computes the guesses (engine/worker/draft_runner.py), or a fake in tests."""

    def begin(self, rows: Sequence[DrafterCatchUp]) -> list[DraftToken]:
        """Compute the rows. Returns a guess for each that wants one."""

    def another(self, keep: Sequence[int]) -> list[DraftToken]:
        """One guess more for these of the sequences of the last call, by their places there."""


@dataclass(frozen=True, slots=True)
class DraftPages:
    """The KV cache of the model, or the heads, that draft."""

    block_size: int
    piece: int
    """Tokens that are hashed together; a divisor of block_size."""
    first_spare: int
    """Behind the pages that sequences own there are `spare` pages for each slot, from this one on, for drafts beyond a
    sequence's pages; what is in these is lost."""
    spare: int
    max_model_len: int

    def spare_of(self, slot: int) -> range:
        first = self.first_spare + slot * self.spare
        return range(first, first + self.spare)

    def table(self, blocks: list[int], slot: int) -> list[int]:
        """A sequence's pages and the spare ones of a slot."""
        return [*blocks, *self.spare_of(slot)]


@dataclass(slots=True)
class _Done:
    """What the model has computed of a sequence."""

    tokens: int
    """The first tokens of the sequence, known then,"""
    drafts: list[int]
    """and drafts after them."""
    pages: list[int]
    """Which hold them: the sequence's own list. It is another one after a preemption, whatever pages are in it,"""
    sent: int
    """and of these the model's slot has so many."""


@dataclass(frozen=True, slots=True)
class _Guessing:
    """A sequence that gets a guess, token by token."""

    place: int
    """In what was asked."""
    seq: Request
    tokens: list[int] = field(default_factory=list)
    chances: list[float] = field(default_factory=list)


class ModelDrafter(StepwiseDrafter):
    def __init__(self, model: DraftingModel, pages: DraftPages, max_tokens: int) -> None:
        """`max_tokens`: the most that the model computes in a step."""
        self._model = model
        self._pages = pages
        self._max_tokens = max_tokens
        self._done: dict[str, _Done] = {}
        """By request id."""
        self._admitted: dict[int, str] = {}
        """By slot: the request whose tokens it has, as many as are done."""
        self._held: dict[int, bytes] = {}
        """By full page: the hash of the tokens whose keys and values were computed for it."""
        self._under_way: list[_Guessing] = []
        """The sequences of the last call."""

    def begin(self, asked: DraftRequests) -> list[Draft]:
        budget = self._max_tokens
        rows, self._under_way = list[DrafterCatchUp](), []
        for place, (request, most) in enumerate(asked):
            most = min(most, self._pages.max_model_len - len(request.token_ids))
            row = self._catch_up(request, budget) if most > 0 and budget > 0 else None
            if row is not None:
                budget -= row.count
                rows.append(row)
                if row.wants_draft:
                    self._under_way.append(_Guessing(place, request))
        if rows:
            self._take(self._model.begin(rows))
        found = {each.place: Draft(each.tokens, probabilities=each.chances) for each in self._under_way}
        return [found.get(place, Draft([])) for place in range(len(asked))]

    def another(self, places: Sequence[int]) -> None:
        wanted = set(places)
        keep = [index for index, each in enumerate(self._under_way) if each.place in wanted]
        self._under_way = [self._under_way[index] for index in keep]
        for each in self._under_way:
            done = self._done[each.seq.engine_request.id]
            room = len(each.seq.block_ids) * self._pages.block_size - done.tokens
            done.drafts = each.tokens[:room]  # they are computed now, and stay where they are in the sequence's pages
        self._take(self._model.another(keep))

    def on_finished(self, request: Request) -> None:
        self._done.pop(request.engine_request.id, None)

    def _take(self, drafted: list[DraftToken]) -> None:
        for each, one in zip(self._under_way, drafted, strict=True):
            each.tokens.append(one.token)
            each.chances.append(one.probability)

    def _catch_up(self, request: Request, budget: int) -> DrafterCatchUp:
        """What is to be computed of the sequence, at most so many tokens, and counts as done from now on."""
        assert request.slot is not None
        name, known = request.engine_request.id, len(request.token_ids)
        done = self._done.get(name)
        if done is not None and done.pages is not request.block_ids:
            done = None
        ready = self._in_pages(request) if done is None else _right(done, request)
        if done is None and ready == known:  # a slot that is new to it begins behind whole pages, which hold states
            ready -= self._pages.block_size
        start = min(ready, known - 1)
        count = min(known - start, budget)
        spare, admission, first_page = self._pages.spare_of(request.slot), None, 0
        if done is None or self._admitted.get(request.slot) != name:
            admission = NewRequestData(
                request.slot,
                request.token_ids,
                request.num_prompt_tokens,
                draft_params(request),
                request.engine_request.seed,
            )
            self._admitted[request.slot] = name
        else:
            first_page = done.sent
        self._done[name] = _Done(start + count, [], request.block_ids, len(request.block_ids))
        self._note_pages(request, start, start + count)
        new_tokens = [] if admission is not None else request.token_ids[start : start + count]
        pages = [*request.block_ids[first_page:], *spare]
        return DrafterCatchUp(
            request.slot, start, count, new_tokens, first_page, pages, admission, start + count == known
        )

    def _in_pages(self, request: Request) -> int:
        """How many of the sequence's first tokens have their keys and values in its pages."""
        count = 0
        for page, digest in zip(request.block_ids, self._digests(request, len(request.token_ids)), strict=False):
            if self._held.get(page) != digest:
                break
            count += self._pages.block_size
        return count

    def _digests(self, request: Request, tokens: int) -> list[bytes]:
        """Of the full pages of so many first tokens."""
        size, piece = self._pages.block_size, self._pages.piece
        pieces = size // piece
        return list(request.block_hashes(tokens // size * pieces, piece)[pieces - 1 :: pieces])

    def _note_pages(self, request: Request, begin: int, end: int) -> None:
        """The tokens from `begin` to before `end` are computed, and perhaps drafts after them."""
        first = begin // self._pages.block_size
        for page in request.block_ids[first:]:
            self._held.pop(page, None)
        if first < end // self._pages.block_size:
            self._held.update(zip(request.block_ids[first:], self._digests(request, end)[first:], strict=False))


def _right(done: _Done, request: Request) -> int:
    """How many of the sequence's first tokens are computed: those that were known then, and right drafts."""
    count = 0
    for draft, token in zip(done.drafts, request.token_ids[done.tokens :], strict=False):
        if draft != token:
            break
        count += 1
    return done.tokens + count


def draft_params(request: Request) -> SamplingParams:
    """The request's parameters without what only its answer needs. Its grammar is left out: it would have to follow
    drafts that may be wrong."""
    params = request.engine_request.sampling
    assert params is not None
    return msgspec.structs.replace(params, logprobs=None, prompt_logprobs=None, logprob_token_ids=None, grammar=None)
