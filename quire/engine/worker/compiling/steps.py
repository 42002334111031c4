"""Steps that launch every kind of kernel that a model's steps may launch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from quire.engine.models.decoder import Decoder, KVCache
from quire.engine.models.heads.head import DraftHead
from quire.engine.worker.inputs import ForwardInputs, Slots
from quire.engine.worker.scratch import scratch_step
from quire.kernels.backend import LinearContext
from quire.kernels.recurrent.recurrence import Guesses

_QUERIES = (1, 2, 16, 24, 40, 128, 512)
"""Tokens of a sequence. Tiles are chosen by numbers of rows: of a product up to 16, 32, 64, more; of attention up
to 16, 64, more, times heads of a group; of experts the same of each expert, which has a part of them."""
_LONG = 4096
"""Keys before a step's own: their sums are then split."""
_LOGIT_ROWS = (1, 24, 40, 256)


def shapes(slots: Slots, step_tokens: int) -> Iterator[tuple[int, int, int]]:
    """(sequences, queries of each, keys of each): alone and beside others, with short contexts and with long ones."""
    longest = slots.max_pages * slots.block_size
    most = len(slots.owners)
    for queries in (*_QUERIES, step_tokens):
        for context in {min(queries, longest), min(queries + _LONG, longest)}:
            if queries <= context:
                yield 1, queries, context
    for seqs in sorted({min(each, most) for each in (40, most)}):
        for context in {1, min(_LONG, longest)}:
            yield seqs, 1, context


@torch.inference_mode()
def launch_every_kind(model: Decoder, kv_cache: KVCache, slots: Slots, step_tokens: int) -> None:
    """On the scratch page. What it computes is nothing, under `recorded`."""
    hidden = None
    for shape in shapes(slots, step_tokens):
        inputs = scratch_step(slots, *shape)
        for given in (
            inputs,
            *_variants(inputs, shape, slots),
            *([_adapted(inputs)] if model.adapters is not None else []),
        ):
            hidden = model.forward(given.token_ids, given.metadata, kv_cache, given.sampled)
    assert hidden is not None
    if not model.has_head:
        return
    for rows in _LOGIT_ROWS:
        several = hidden[:1].expand(rows, -1).contiguous()
        logits = model.logits(several)
        if model.adapters is not None:
            model.logits(several, _context(several))
    if model.shard.rank == 0:  # others hear what it picks
        _launch_sampler(logits, slots)


@torch.inference_mode()
def launch_head(head: DraftHead, size: int, dtype: torch.dtype, kv_cache: KVCache, slots: Slots, tokens: int) -> None:
    """The same of heads beside steps of up to so many `tokens`, which have hidden states of this `size`, and of their
    guesses."""
    states = torch.zeros((1, size), dtype=dtype, device=slots.device)
    for shape in shapes(slots, tokens) if kv_cache else ():
        inputs = scratch_step(slots, *shape)
        for each in (inputs, *_variants(inputs, shape, slots)):
            ids, hidden = each.token_ids, states.expand(len(each.token_ids), -1).contiguous()
            states = head.observe(ids, hidden, [hidden] * len(head.taps), each.metadata, kv_cache)[:1].contiguous()
            head.advance(ids, hidden, each.metadata, kv_cache)
    for guessed in range(head.most or 1):
        for rows in _LOGIT_ROWS:
            logits = head.logits(states.expand(rows, -1).contiguous(), guessed)
    _launch_sampler(logits, slots)


def _variants(inputs: ForwardInputs, shape: tuple[int, int, int], slots: Slots) -> list[ForwardInputs]:
    """The same as whole prompts, whose latents are expanded, and with guesses, which matrices keep."""
    (_, queries, context), metadata, found = shape, inputs.metadata, list[ForwardInputs]()
    if 1 < queries == context:
        found.append(replace(inputs, metadata=replace(metadata, whole=True)))
    if slots.keeps_guesses and queries == 2:
        guesses = Guesses(metadata.context_lens - 2, metadata.context_lens - 1)
        found.append(replace(inputs, metadata=replace(metadata, guesses=guesses)))
    return found


def _context(rows: torch.Tensor) -> LinearContext:
    return LinearContext.of(torch.ones(len(rows), dtype=torch.int64, device=rows.device))


def _adapted(inputs: ForwardInputs) -> ForwardInputs:
    """The same of tokens that all have an adapter."""
    metadata, linear = inputs.metadata, _context(inputs.token_ids)
    others = tuple(replace(each, linear=linear) for each in metadata.others)
    return replace(inputs, metadata=replace(metadata, linear=linear, others=others))


def _launch_sampler(logits: torch.Tensor, slots: Slots) -> None:
    """As engine/worker/sampling/device_sampler.py launches it: greedy, from all tokens, from the likeliest; penalties,
    biases, and words that may not come."""
    from quire.kernels.gpu import triton_logits, triton_sampling

    rows, table = len(logits), slots.token_ids
    if logits.shape[1] > triton_sampling.MOST_TOKENS:
        return
    real = torch.ones(rows, device=logits.device)
    whole = torch.ones(rows, dtype=torch.int64, device=logits.device)
    asked = (real, whole.int(), real.double(), real, whole, whole)
    for drawn, filtered in ((False, False), (True, False), (True, True)):
        triton_sampling.pick(logits, *asked, drawn=drawn, filtered=filtered)
    triton_logits.penalize(logits, table, whole, whole, whole, whole, real, real, real, longest=table.shape[1] - 1)
    triton_logits.add(logits, whole, whole, real)
    triton_logits.ban(logits, table, whole, whole, whole, whole.int(), whole.int())
