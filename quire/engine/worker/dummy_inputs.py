"""Inputs of dummy steps on the scratch block, for warm-up."""

from __future__ import annotations

import torch

from quire.engine.worker.input_batch import ForwardInputs, InputBatch
from quire.kernels.backend import AttentionMetadata


def dummy_prefill_inputs(slots: InputBatch, length: int) -> ForwardInputs:
    length = min(length, slots.max_blocks * slots.block_size)
    return dummy_step_inputs(slots, 1, length, length)


def dummy_step_inputs(slots: InputBatch, seqs: int, queries: int, context: int) -> ForwardInputs:
    """Each of `seqs` sequences computes the last `queries` of `context` tokens."""
    assert slots.scratch_block is not None
    device, size = slots.device, slots.block_size
    positions = torch.arange(context - queries, context, device=device).repeat(seqs)
    table = torch.full((seqs, -(-context // size)), slots.scratch_block, dtype=torch.int32, device=device)
    starts = torch.arange(seqs + 1, dtype=torch.int32, device=device)
    metadata = AttentionMetadata(
        query_start=starts * queries,
        context_lens=torch.full((seqs,), context, dtype=torch.int32, device=device),
        key_start=starts * context,
        block_table=table,
        positions=positions,
        slot_mapping=slots.context_shard.slot_mapping(table[0, 0].long(), positions),
        max_query_len=queries,
        max_context_len=context,
        state_slots=torch.full((seqs,), slots.scratch_slot, device=device),
    )
    metadata = metadata.with_block_tables([table] * slots.num_groups, [metadata.slot_mapping] * slots.num_groups)
    token_slots = torch.full_like(positions, slots.scratch_slot)
    last = torch.arange(queries - 1, seqs * queries, queries, device=device)
    return ForwardInputs(torch.zeros_like(positions, dtype=torch.int32), metadata, last, token_slots)
