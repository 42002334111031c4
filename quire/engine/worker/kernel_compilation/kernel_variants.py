from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from quire.engine.models.decoder import Decoder, KVCache
from quire.engine.models.heads.draft_head import DraftHead
from quire.engine.worker.dummy_inputs import dummy_step_inputs
from quire.engine.worker.input_batch import ForwardInputs, InputBatch
from quire.kernels.backend import LinearContext
from quire.kernels.recurrent.recurrence import StateAndVerifiedCounts

_QUERY_LENGTHS = (1, 2, 16, 24, 40, 128, 512)
"""Query lengths that lead to all tile sizes. Matrix products have tiles for up to 16, 32, 64 or more rows. Attention
has tiles for up to 16, 64 or more rows, where a token counts as many rows as a KV head has query heads.
"""
_LONG_CONTEXT = 4096
_LOGIT_ROW_COUNTS = (1, 24, 40, 256)


def dummy_step_shapes(slots: InputBatch, step_tokens: int) -> Iterator[tuple[int, int, int]]:
    longest = slots.max_blocks * slots.block_size
    max_seqs = len(slots.slot_requests)
    for queries in (*_QUERY_LENGTHS, step_tokens):
        for context in {min(queries, longest), min(queries + _LONG_CONTEXT, longest)}:
            if queries <= context:
                yield 1, queries, context
    for seqs in sorted({min(each, max_seqs) for each in (40, max_seqs)}):
        for context in {1, min(_LONG_CONTEXT, longest)}:
            yield seqs, 1, context


@torch.inference_mode()
def launch_kernel_variants(model: Decoder, kv_cache: KVCache, slots: InputBatch, step_tokens: int) -> None:
    """Uses the scratch block. A dry run computes nothing."""
    hidden = None
    for shape in dummy_step_shapes(slots, step_tokens):
        inputs = dummy_step_inputs(slots, *shape)
        for variant_inputs in (
            inputs,
            *_input_variants(inputs, shape, slots),
            *([_inputs_with_adapters(inputs)] if model.adapters is not None else []),
        ):
            hidden = model.forward(
                variant_inputs.token_ids, variant_inputs.metadata, kv_cache, variant_inputs.sampled_indices
            )
    assert hidden is not None
    if not model.has_head:
        return
    for rows in _LOGIT_ROW_COUNTS:
        rows_hidden = hidden[:1].expand(rows, -1).contiguous()
        logits = model.compute_logits(rows_hidden)
        if model.adapters is not None:
            model.compute_logits(rows_hidden, _adapter_context(rows_hidden))
    if model.shard.rank == 0:
        _launch_sampler_variants(logits, slots)


@torch.inference_mode()
def launch_draft_head_variants(
    head: DraftHead, size: int, dtype: torch.dtype, kv_cache: KVCache, slots: InputBatch, tokens: int
) -> None:
    states = torch.zeros((1, size), dtype=dtype, device=slots.device)
    for shape in dummy_step_shapes(slots, tokens) if kv_cache else ():
        inputs = dummy_step_inputs(slots, *shape)
        for each in (inputs, *_input_variants(inputs, shape, slots)):
            ids, hidden = each.token_ids, states.expand(len(each.token_ids), -1).contiguous()
            states = head.compute_states(ids, hidden, [hidden] * len(head.aux_layers), each.metadata, kv_cache)[
                :1
            ].contiguous()
            head.advance_states(ids, hidden, each.metadata, kv_cache)
    for draft_index in range(head.max_draft_tokens or 1):
        for rows in _LOGIT_ROW_COUNTS:
            logits = head.compute_logits(states.expand(rows, -1).contiguous(), draft_index)
    _launch_sampler_variants(logits, slots)


def _input_variants(inputs: ForwardInputs, shape: tuple[int, int, int], slots: InputBatch) -> list[ForwardInputs]:
    """Full prompts are variants for MLA, and draft tokens for recurrent states."""
    _, queries, context = shape
    metadata = inputs.metadata
    variants = list[ForwardInputs]()
    if 1 < queries == context:
        variants.append(replace(inputs, metadata=replace(metadata, is_full_prefill=True)))
    if slots.tracks_recurrent_state_lengths and queries == 2:
        guesses = StateAndVerifiedCounts(metadata.context_lens - 2, metadata.context_lens - 1)
        variants.append(replace(inputs, metadata=replace(metadata, state_and_verified_counts=guesses)))
    return variants


def _adapter_context(rows: torch.Tensor) -> LinearContext:
    return LinearContext.from_adapter_slots(torch.ones(len(rows), dtype=torch.int64, device=rows.device))


def _inputs_with_adapters(inputs: ForwardInputs) -> ForwardInputs:
    metadata, linear = inputs.metadata, _adapter_context(inputs.token_ids)
    others = tuple(replace(each, linear_context=linear) for each in metadata.other_groups)
    return replace(inputs, metadata=replace(metadata, linear_context=linear, other_groups=others))


def _launch_sampler_variants(logits: torch.Tensor, slots: InputBatch) -> None:
    from quire.kernels.gpu import triton_logits, triton_sampling

    rows, table = len(logits), slots.token_ids
    if logits.shape[1] > triton_sampling.MAX_VOCAB:
        return
    float_column = torch.ones(rows, device=logits.device)
    int_column = torch.ones(rows, dtype=torch.int64, device=logits.device)
    sampling_arguments = (float_column, int_column.int(), float_column.double(), float_column, int_column, int_column)
    for drawn, filtered in ((False, False), (True, False), (True, True)):
        triton_sampling.sample_tokens(logits, *sampling_arguments, has_sampling=drawn, has_filters=filtered)
    triton_logits.penalize_tokens(
        logits,
        table,
        int_column,
        int_column,
        int_column,
        int_column,
        float_column,
        float_column,
        float_column,
        longest=table.shape[1] - 1,
    )
    triton_logits.add_logit_bias(logits, int_column, int_column, float_column)
    triton_logits.ban_bad_words(logits, table, int_column, int_column, int_column, int_column.int(), int_column.int())
