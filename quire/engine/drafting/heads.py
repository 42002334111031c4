"""Drafts of heads that guess from the hidden states of the served model itself. The worker has the heads and their
states; here is decided which sequences they are asked about."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from typing import Protocol

from quire.engine.core.batch import DraftRow
from quire.engine.core.drafter import Asked, Drafter, Guess
from quire.engine.drafting.model import DraftPages


class Heads(Protocol):
    """What computes the guesses (engine/worker/heads.py), or a fake in tests."""

    def draft(self, rows: SequenceOf[DraftRow]) -> list[list[int]]:
        """Guesses for each of the rows, at most as many as it asks for."""


class HeadDrafter(Drafter):
    def __init__(self, heads: Heads, pages: DraftPages) -> None:
        self._heads = heads
        self._pages = pages

    def propose(self, asked: Asked, tokens: int) -> list[Guess]:
        rows = []
        for seq, most in asked:
            assert seq.slot is not None
            known = len(seq.tokens)
            count = min(most, self._pages.max_model_len - known)
            blocks = self._pages.table(seq.blocks, seq.slot) if count > 0 else []
            rows.append(DraftRow(seq.slot, known, max(count, 0), blocks))
        return [Guess(tokens) for tokens in self._heads.draft(rows)]
