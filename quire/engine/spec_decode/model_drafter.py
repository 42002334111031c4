"""Drafts by a smaller model (Leviathan et al., 2023). The draft model samples with the request's parameters and random
numbers. So its tokens often equal the served model's even if they are sampled. Its KV blocks have the same ids as the
served model's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from quire.engine.common.request_params import SamplingParams
from quire.engine.common.scheduler_output import DrafterCatchUp, DraftToken, NewRequestData
from quire.engine.core.drafter import Draft, RequestsToDraft, TokenwiseDrafter
from quire.engine.core.request import Request


class DraftModel(Protocol):
    def draft_first_tokens(self, rows: Sequence[DrafterCatchUp]) -> list[DraftToken]:
        """Compute all rows. Return a token for each row with `wants_draft`."""

    def draft_next_tokens(self, keep: Sequence[int]) -> list[DraftToken]:
        """`keep`: indices of rows of the last call."""


@dataclass(frozen=True, slots=True)
class DraftBlockLayout:
    block_size: int
    hash_block_size: int
    first_spare_block: int
    """Each slot has `num_spare_blocks` blocks for drafts."""
    num_spare_blocks: int
    max_model_len: int

    def spare_blocks(self, slot: int) -> range:
        first = self.first_spare_block + slot * self.num_spare_blocks
        return range(first, first + self.num_spare_blocks)

    def block_table(self, block_ids: list[int], slot: int) -> list[int]:
        return [*block_ids, *self.spare_blocks(slot)]


@dataclass(slots=True)
class _DraftModelState:
    num_tokens: int
    """Number of leading tokens that the draft model has computed, without drafts."""
    drafts: list[int]
    block_ids: list[int]
    """The request's own list object. After a preemption the request has another one."""
    num_sent_blocks: int
    """Number of entries of `block_ids` that the draft model's slot already has."""


@dataclass(frozen=True, slots=True)
class _OpenDraft:
    index: int
    request: Request
    token_ids: list[int] = field(default_factory=list)
    probabilities: list[float] = field(default_factory=list)


class ModelDrafter(TokenwiseDrafter):
    def __init__(self, model: DraftModel, blocks: DraftBlockLayout, max_tokens: int) -> None:
        self._model = model
        self._blocks = blocks
        self._max_tokens = max_tokens
        self._states: dict[str, _DraftModelState] = {}
        self._slot_requests: dict[int, str] = {}
        self._hash_of_block: dict[int, bytes] = {}
        self._open_drafts: list[_OpenDraft] = []

    def draft_first_tokens(self, draft_requests: RequestsToDraft) -> list[Draft]:
        budget = self._max_tokens
        rows, self._open_drafts = list[DrafterCatchUp](), []
        for index, (request, max_drafts) in enumerate(draft_requests):
            max_drafts = min(max_drafts, self._blocks.max_model_len - len(request.token_ids))
            row = self._plan_catch_up(request, budget) if max_drafts > 0 and budget > 0 else None
            if row is not None:
                budget -= row.num_tokens
                rows.append(row)
                if row.wants_draft:
                    self._open_drafts.append(_OpenDraft(index, request))
        if rows:
            self._append_draft_tokens(self._model.draft_first_tokens(rows))
        drafts = {each.index: Draft(each.token_ids, probabilities=each.probabilities) for each in self._open_drafts}
        return [drafts.get(index, Draft([])) for index in range(len(draft_requests))]

    def draft_next_tokens(self, indices: Sequence[int]) -> None:
        wanted_indices = set(indices)
        keep = [index for index, each in enumerate(self._open_drafts) if each.index in wanted_indices]
        self._open_drafts = [self._open_drafts[index] for index in keep]
        for each in self._open_drafts:
            state = self._states[each.request.engine_request.id]
            room = len(each.request.block_ids) * self._blocks.block_size - state.num_tokens
            state.drafts = each.token_ids[:room]
        self._append_draft_tokens(self._model.draft_next_tokens(keep))

    def forget_request(self, request: Request) -> None:
        self._states.pop(request.engine_request.id, None)

    def _append_draft_tokens(self, draft_tokens: list[DraftToken]) -> None:
        for open_draft, draft_token in zip(self._open_drafts, draft_tokens, strict=True):
            open_draft.token_ids.append(draft_token.token_id)
            open_draft.probabilities.append(draft_token.probability)

    def _plan_catch_up(self, request: Request, budget: int) -> DrafterCatchUp:
        """From now on the planned tokens count as computed."""
        assert request.slot is not None
        request_id, num_known = request.engine_request.id, len(request.token_ids)
        state = self._states.get(request_id)
        if state is not None and state.block_ids is not request.block_ids:
            state = None
        num_computed = (
            self._num_tokens_with_draft_kv(request)
            if state is None
            else _num_tokens_with_matching_drafts(state, request)
        )
        if state is None and num_computed == num_known:  # a new slot starts after a full block, which may hold a state
            num_computed -= self._blocks.block_size
        start = min(num_computed, num_known - 1)
        count = min(num_known - start, budget)
        spare = self._blocks.spare_blocks(request.slot)
        new_request = None
        first_block = 0
        if state is None or self._slot_requests.get(request.slot) != request_id:
            new_request = NewRequestData(
                request.slot,
                request.token_ids,
                request.num_prompt_tokens,
                draft_sampling_params(request),
                request.engine_request.seed,
            )
            self._slot_requests[request.slot] = request_id
        else:
            first_block = state.num_sent_blocks
        self._states[request_id] = _DraftModelState(start + count, [], request.block_ids, len(request.block_ids))
        self._record_blocks(request, start, start + count)
        new_tokens = [] if new_request is not None else request.token_ids[start : start + count]
        block_ids = [*request.block_ids[first_block:], *spare]
        return DrafterCatchUp(
            request.slot, start, count, new_tokens, first_block, block_ids, new_request, start + count == num_known
        )

    def _num_tokens_with_draft_kv(self, request: Request) -> int:
        count = 0
        for block, digest in zip(
            request.block_ids, self._full_block_hashes(request, len(request.token_ids)), strict=False
        ):
            if self._hash_of_block.get(block) != digest:
                break
            count += self._blocks.block_size
        return count

    def _full_block_hashes(self, request: Request, tokens: int) -> list[bytes]:
        size, hash_size = self._blocks.block_size, self._blocks.hash_block_size
        hashes_per_block = size // hash_size
        return list(
            request.block_hashes(tokens // size * hashes_per_block, hash_size)[hashes_per_block - 1 :: hashes_per_block]
        )

    def _record_blocks(self, request: Request, begin: int, end: int) -> None:
        """Later blocks lose their hashes, because they may contain drafts."""
        first = begin // self._blocks.block_size
        for block in request.block_ids[first:]:
            self._hash_of_block.pop(block, None)
        if first < end // self._blocks.block_size:
            self._hash_of_block.update(
                zip(request.block_ids[first:], self._full_block_hashes(request, end)[first:], strict=False)
            )


def _num_tokens_with_matching_drafts(state: _DraftModelState, request: Request) -> int:
    """Number of tokens that the draft model has computed for the request, plus the correct drafts after them."""
    count = 0
    for draft, token in zip(state.drafts, request.token_ids[state.num_tokens :], strict=False):
        if draft != token:
            break
        count += 1
    return state.num_tokens + count


def draft_sampling_params(request: Request) -> SamplingParams:
    """Omits the grammar, because it would have to follow drafts that may be wrong."""
    params = request.engine_request.sampling_params
    assert params is not None
    return msgspec.structs.replace(params, logprobs=None, prompt_logprobs=None, logprob_token_ids=None, grammar=None)
