"""Steps on the scratch page, which no sequence has: what runs or launches kernels before somebody needs them."""

from __future__ import annotations

import torch

from quire.engine.worker.inputs import ForwardInputs, Slots
from quire.kernels.backend import AttentionMetadata


def scratch_prompt(slots: Slots, length: int) -> ForwardInputs:
    """A prompt of that length, or of the longest there may be."""
    length = min(length, slots.max_pages * slots.block_size)
    return scratch_step(slots, 1, length, length)


def scratch_step(slots: Slots, seqs: int, queries: int, context: int) -> ForwardInputs:
    """The last tokens of so many contexts, each of which is the scratch page again and again."""
    assert slots.scratch_page is not None
    device, size = slots.device, slots.block_size
    positions = torch.arange(context - queries, context, device=device).repeat(seqs)
    table = torch.full((seqs, -(-context // size)), slots.scratch_page, dtype=torch.int32, device=device)
    starts = torch.arange(seqs + 1, dtype=torch.int32, device=device)
    metadata = AttentionMetadata(
        query_start=starts * queries,
        context_lens=torch.full((seqs,), context, dtype=torch.int32, device=device),
        key_start=starts * context,
        block_table=table,
        positions=positions,
        slots=slots.own.slots(table[0, 0].long(), positions),
        max_query_len=queries,
        max_context_len=context,
        state_slots=torch.full((seqs,), slots.scratch_slot, device=device),
    )
    metadata = metadata.grouped([table] * slots.groups, [metadata.slots] * slots.groups)
    owners = torch.full_like(positions, slots.scratch_slot)
    last = torch.arange(queries - 1, seqs * queries, queries, device=device)
    return ForwardInputs(torch.zeros_like(positions, dtype=torch.int32), metadata, last, owners)
