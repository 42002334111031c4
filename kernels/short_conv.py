"""Gated short convolutions (LFM2: Liquid AI, 2025) in plain PyTorch: the judge of the compiled kernels.

Of a token's numbers b, c and x, in each channel: the column b * x, rounded to their type; the sum of the last `width`
columns, weighed; and c times that sum. Before a sequence's beginning columns are 0. A column has one place, which
follows from its position alone, so that no bit depends on how a sequence was cut into steps: the last ones of every
piece of some tokens lie in their page, for whoever begins behind them, all others in the sequence's slot.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from quire.kernels.backend import AttentionMetadata


@dataclass(frozen=True, slots=True)
class ShortConv:
    weight: Tensor
    """[width, channels] float32, of the oldest column first; width is at least 2."""
    bias: Tensor | None
    """[channels] float32, added to the sum."""

    @property
    def width(self) -> int:
        return len(self.weight)


@dataclass(frozen=True, slots=True)
class Columns:
    """Where a layer's columns lie, all of the type of what is convolved."""

    ends: Tensor
    """[pages, pieces of a page, width - 1, channels]: the last columns of each piece,"""
    piece: int
    """which has so many tokens, at least width - 1."""
    recent: Tensor
    """[slots, kept, channels]: the others of a sequence's last ones, that of position p at p % kept. `kept` is at least
    width - 1, and as many more as a row may have drafts: those that turn out wrong overwrite nothing that is needed."""

    @property
    def kept(self) -> int:
        return self.recent.shape[1]


def short_conv(bcx: Tensor, conv: ShortConv, columns: Columns, metadata: AttentionMetadata) -> Tensor:
    """Operations.short_conv. Row by row: what one stores in a page, a later one may begin with."""
    assert metadata.state_slots is not None
    b, c, x = bcx.chunk(3, dim=-1)
    fresh, before = b * x, conv.width - 1
    wide = torch.float64 if bcx.dtype == torch.float64 else torch.float32
    weight, out = conv.weight.to(wide), torch.empty_like(fresh)
    starts, contexts = metadata.query_start.tolist(), metadata.context_lens.tolist()
    for s, (context, slot) in enumerate(zip(contexts, metadata.state_slots.tolist(), strict=True)):
        rows = slice(starts[s], starts[s + 1])
        first = context - (rows.stop - rows.start)
        place = _Places(columns, metadata.block_table[s].tolist(), slot, before)
        past = [place.of(at) if at >= 0 else torch.zeros_like(fresh[0]) for at in range(first - before, first)]
        series = torch.cat([torch.stack(past), fresh[rows]]).to(wide)
        total = torch.zeros_like(series[before:]) if conv.bias is None else conv.bias.to(wide)
        for tap in range(conv.width):
            total = total + weight[tap] * series[tap : tap + context - first]
        out[rows] = (c[rows].to(wide) * total).to(out.dtype)
        for at in range(first, context):
            if at >= context - columns.kept or place.is_end(at):
                place.of(at).copy_(fresh[rows.start + at - first])
    return out


@dataclass(frozen=True, slots=True)
class _Places:
    """Of one sequence's columns."""

    columns: Columns
    pages: list[int]
    slot: int
    before: int

    def is_end(self, position: int) -> bool:
        return position % self.columns.piece >= self.columns.piece - self.before

    def of(self, position: int) -> Tensor:
        if not self.is_end(position):
            return self.columns.recent[self.slot, position % self.columns.kept]
        size, ends = self.columns.piece, self.columns.ends
        page, piece = divmod(position // size, ends.shape[1])
        return ends[self.pages[page], piece, position % size - (size - self.before)]
