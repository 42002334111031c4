"""Drafts of heads that guess from the hidden states of the served model itself. The worker has the heads and their
states; here is decided which sequences they are asked about."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from quire.engine.core.drafter import Draft, Drafter, DraftRequests
from quire.engine.core.scheduler_output import DraftRequest
from quire.engine.drafting.model import DraftPages


class Heads(Protocol):
    """What computes the guesses (engine/worker/heads.py), or a fake in tests."""

    def draft(self, rows: Sequence[DraftRequest]) -> list[list[int]]:
        """Guesses for each of the rows, at most as many as it asks for."""


class HeadDrafter(Drafter):
    def __init__(self, heads: Heads, pages: DraftPages) -> None:
        self._heads = heads
        self._pages = pages

    def propose(self, asked: DraftRequests, tokens: int) -> list[Draft]:
        rows = []
        for request, most in asked:
            assert request.slot is not None
            known = len(request.token_ids)
            count = min(most, self._pages.max_model_len - known)
            blocks = self._pages.table(request.block_ids, request.slot) if count > 0 else []
            rows.append(DraftRequest(request.slot, known, max(count, 0), blocks))
        return [Draft(tokens) for tokens in self._heads.draft(rows)]
