from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from quire.engine.common.scheduler_output import HeadDraftRequest
from quire.engine.core.drafter import Draft, Drafter, RequestsToDraft
from quire.engine.spec_decode.model_drafter import DraftBlockLayout


class DraftHeads(Protocol):
    def draft_tokens(self, rows: Sequence[HeadDraftRequest]) -> list[list[int]]:
        """Return for each row at most `num_drafts` tokens."""


class HeadDrafter(Drafter):
    def __init__(self, heads: DraftHeads, blocks: DraftBlockLayout) -> None:
        self._heads = heads
        self._blocks = blocks

    def propose(self, draft_requests: RequestsToDraft, num_step_tokens: int) -> list[Draft]:
        rows = []
        for request, max_drafts in draft_requests:
            assert request.slot is not None
            num_known = len(request.token_ids)
            count = min(max_drafts, self._blocks.max_model_len - num_known)
            blocks = self._blocks.block_table(request.block_ids, request.slot) if count > 0 else []
            rows.append(HeadDraftRequest(request.slot, num_known, max(count, 0), blocks))
        return [Draft(num_step_tokens) for num_step_tokens in self._heads.draft_tokens(rows)]
