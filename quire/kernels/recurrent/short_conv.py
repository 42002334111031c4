"""Short convolutions. With gates (LFM2: Liquid AI, 2025), a token's column is b * x per channel, rounded to their
dtype, and the result is c times the weighted sum of the last `width` columns. Without gates, as before delta nets (Yang
et al., 2024), the column is x, and the result is SiLU of the sum. Columns before the sequence are 0.

A column's place follows from its position alone, so bits do not depend on how a sequence is divided into steps. A block
is divided into pieces, and holds the last columns of each for prefix cache hits. The sequence's slot holds the other
columns, or all columns if another state is too large for blocks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class ShortConv:
    weight: Tensor
    """[width, channels] float32, where the first row is for the oldest column. width is at least 2."""
    bias: Tensor | None
    """[channels] float32."""
    is_gated: bool = True

    @property
    def conv_width(self) -> int:
        return len(self.weight)

    @property
    def num_input_parts(self) -> int:
        """Inputs per channel and token."""
        return 3 if self.is_gated else 1


@dataclass(frozen=True, slots=True)
class ConvStates:
    """Columns in the dtype of the convolution's input."""

    piece_ends: Tensor | None
    """[blocks, pieces per block, width - 1, channels]. None if blocks hold no columns."""
    piece_tokens: int
    """Tokens per piece, at least width - 1."""
    slot_columns: Tensor
    """[slots, columns_per_slot, channels]. The column of position p is at p % columns_per_slot. columns_per_slot is at
    least width - 1 plus the maximum of draft tokens, so that rejected drafts overwrite nothing that is needed.
    """

    @property
    def columns_per_slot(self) -> int:
        return self.slot_columns.shape[1]


def short_conv(
    bcx: Tensor, conv: ShortConv, columns: ConvStates, where: tuple[Tensor, Tensor, Tensor], block_table: Tensor
) -> Tensor:
    """`where` has query_start, context_lens and state_slots. Runs sequences in order, because a sequence may start from
    columns that an earlier one stores.
    """
    fresh, gates = bcx, None
    if conv.is_gated:
        b, gates, x = bcx.chunk(3, dim=-1)
        fresh = b * x
    out = torch.empty_like(fresh)
    starts, contexts, slots = (each.tolist() for each in where)
    for s, (context, slot) in enumerate(zip(contexts, slots, strict=True)):
        own = slice(starts[s], starts[s + 1])
        places = _ColumnLocator(columns, block_table[s].tolist(), slot, conv.conv_width - 1)
        out[own] = _convolve_sequence(fresh[own], None if gates is None else gates[own], conv, places, context)
    return out


def _convolve_sequence(
    fresh: Tensor, c: Tensor | None, conv: ShortConv, places: _ColumnLocator, context: int
) -> Tensor:
    wide, first = torch.float64 if fresh.dtype == torch.float64 else torch.float32, context - len(fresh)
    past = [
        places.stored_column_view(at) if at >= 0 else torch.zeros_like(fresh[0])
        for at in range(first - places.num_earlier, first)
    ]
    series, weight = torch.cat([torch.stack(past), fresh]).to(wide), conv.weight.to(wide)
    total = torch.zeros_like(series[places.num_earlier :]) if conv.bias is None else conv.bias.to(wide)
    for tap in range(conv.conv_width):
        total = total + weight[tap] * series[tap : tap + len(fresh)]
    for at in range(first, context):
        if at >= context - places.columns.columns_per_slot or places.is_stored_in_page(at):
            places.stored_column_view(at).copy_(fresh[at - first])
    if c is None:  # row by row, because the bits of vectorized SiLU depend on the length
        return torch.stack([torch.nn.functional.silu(row) for row in total]).to(fresh.dtype)
    return (c.to(wide) * total).to(fresh.dtype)


@dataclass(frozen=True, slots=True)
class _ColumnLocator:
    columns: ConvStates
    pages: list[int]
    slot: int
    num_earlier: int

    def is_stored_in_page(self, position: int) -> bool:
        return (
            self.columns.piece_ends is not None
            and position % self.columns.piece_tokens >= self.columns.piece_tokens - self.num_earlier
        )

    def stored_column_view(self, position: int) -> Tensor:
        if not self.is_stored_in_page(position):
            return self.columns.slot_columns[self.slot, position % self.columns.columns_per_slot]
        size, ends = self.columns.piece_tokens, self.columns.piece_ends
        assert ends is not None
        page, piece = divmod(position // size, ends.shape[1])
        return ends[self.pages[page], piece, position % size - (size - self.num_earlier)]
