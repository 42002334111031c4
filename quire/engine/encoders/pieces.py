"""An encoder's computation in pieces, between which others have their turn: some tokens in one layer at a time. No
piece changes a bit of what comes out, for kernels compute each token as if it was alone."""

from __future__ import annotations

from collections.abc import Generator
from typing import TypeVar

import numpy as np
import torch

from quire.kernels.backend import AttentionMetadata
from quire.kernels.gpu.transfer import upload

_T = TypeVar("_T")
ROWS = 1024
"""Tokens that a piece computes at most. Linears gain nothing by more."""
BEFORE = 0.25
"""The part of a layer's linears that comes before its attention: three of twelve squares of the hidden size."""
Parts = list[tuple[slice, AttentionMetadata]]
"""A step as several, each with the place of its tokens."""


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


def positions_of(lengths: np.ndarray) -> np.ndarray:
    """Of all tokens of prompts of these lengths [S] int64, [T] int64."""
    starts = np.cumsum(lengths) - lengths
    counted: np.ndarray = np.arange(lengths.sum()) - np.repeat(starts, lengths)
    return counted


def pages_of(lengths: np.ndarray, block_size: int) -> int:
    """That prompts of these lengths have, each its own."""
    return int((-(-lengths // block_size)).sum())


def parts_of(
    lengths: np.ndarray, block_size: int, device: torch.device, rows: int | None = None, *, turned: bool = False
) -> Parts:
    """A step that computes prompts of these lengths [S] int64 from their beginning, each on pages of its own; as
    several of at most so many `rows` (None: as one), all of whose tokens see the same keys, once these are stored.
    turned: tokens are turned by what a table says of their place in the step. Nothing waits for the device."""
    pages = -(-lengths // block_size)
    first, starts = np.cumsum(pages) - pages, np.concatenate(([0], np.cumsum(lengths)))
    longest, count = int(lengths.max()), int(lengths.sum())
    table = np.minimum(first[:, None] + np.arange(-(-longest // block_size)), pages.sum() - 1)
    positions = positions_of(lengths)
    slots = np.repeat(first * block_size, lengths) + positions
    found: Parts = []
    for begin in range(0, count, rows or count):
        end = min(begin + (rows or count), count)
        own = (starts[:-1] < end) & (starts[1:] > begin)
        queries, contexts = np.diff(np.clip(starts, begin, end))[own], lengths[own]
        narrow = (_summed(queries), contexts, _summed(contexts), table[own])
        query_start, lens, key_start, block_table, where, stored, every = upload(
            [
                *(each.astype(np.int32) for each in narrow),
                positions[begin:end],
                slots[begin:end],
                np.arange(begin, end),
            ],
            device,
        )
        made = AttentionMetadata(
            query_start=query_start,
            context_lens=lens,
            key_start=key_start,
            block_table=block_table,
            positions=where,
            slots=stored,
            max_query_len=int(queries.max()),
            max_context_len=int(contexts.max()),
            turns=every if turned else None,
            shapes=tuple(zip(queries.tolist(), contexts.tolist(), strict=True)),
        )
        found.append((slice(begin, end), made))
    return found


def _summed(counts: np.ndarray) -> np.ndarray:
    """[S] to [S + 1]."""
    return np.concatenate(([0], counts.cumsum()))
