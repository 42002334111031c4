"""An encoder's computation in pieces, between which others have their turn: some tokens in one layer at a time. No
piece changes a bit of what comes out, for kernels compute each token as if it was alone."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor

from quire.kernels.backend import AttentionMetadata

_T = TypeVar("_T")
ROWS = 1024
"""Tokens that a piece computes at most. Linears gain nothing by more."""
BEFORE = 0.25
"""The part of a layer's linears that comes before its attention: three of twelve squares of the hidden size."""


def finished(pieces: Generator[float, None, _T]) -> _T:
    """The result of all pieces, one after the other: they yield what each weighs."""
    while True:
        try:
            next(pieces)
        except StopIteration as end:
            found: _T = end.value
            return found


def weight(tokens: float, seen: float, hidden: int) -> float:
    """What tokens weigh that see so many: as Vision.work has it."""
    return tokens * (1 + seen / (4 * hidden))


def parts_of(metadata: AttentionMetadata, rows: int) -> list[tuple[slice, AttentionMetadata]]:
    """A step of whole prompts as several of at most so many tokens, each with the place of its own: all of them attend
    to the same keys, once these are stored."""
    count = len(metadata.positions)
    if count <= rows:
        return [(slice(0, count), metadata)]
    return [
        (slice(at, min(at + rows, count)), _part(metadata, at, min(at + rows, count))) for at in range(0, count, rows)
    ]


def _part(metadata: AttentionMetadata, begin: int, end: int) -> AttentionMetadata:
    """The tokens `begin` to `end` alone."""
    starts = metadata.query_start.long()
    own = (starts[:-1] < end) & (starts[1:] > begin)
    queries, contexts = starts.clamp(begin, end).diff()[own], metadata.context_lens[own]
    return replace(
        metadata,
        query_start=_summed(queries),
        context_lens=contexts,
        key_start=_summed(contexts),
        block_table=metadata.block_table[own],
        positions=metadata.positions[begin:end],
        slots=metadata.slots[begin:end],
        max_query_len=int(queries.max()),
        max_context_len=int(contexts.max()),
        turns=None if metadata.turns is None else metadata.turns[begin:end],
        others=(),
    )


def _summed(counts: Tensor) -> Tensor:
    """[S] to [S + 1] int32."""
    return torch.cat((counts.new_zeros(1), counts.cumsum(0))).int()
